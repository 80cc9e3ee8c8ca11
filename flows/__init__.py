"""When: the flows. Prefect reads its settings on import, so they are set here, before any flow."""

import os
import socket
from urllib.parse import urlsplit

from memsearcher.files import ROOT

API_URL = ROOT / ".prefect" / "api_url"  # written by flows/ui.py while its servers run
MLFLOW_URL = ROOT / ".prefect" / "mlflow_url"

_settings = {
    "PREFECT_HOME": str(ROOT / ".prefect"),  # its database and logs stay in the repository
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",  # a slow machine is not a broken one
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",  # DVC is the only cache
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the stages speak to the terminal
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
if API_URL.is_file():
    _url = API_URL.read_text()
    try:
        socket.create_connection((urlsplit(_url).hostname, urlsplit(_url).port), timeout=1).close()
    except OSError:  # left behind by a server that was killed
        pass
    else:
        _settings["PREFECT_API_URL"] = _url
for _name, _value in _settings.items():
    os.environ.setdefault(_name, _value)
