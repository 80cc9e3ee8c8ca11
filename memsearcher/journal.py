"""What an evaluation has scored so far, so that a killed one goes on and asks nothing twice."""

import json
from pathlib import Path


class Journal:
    """Rows by question id, appended as they come. A last line that was torn by a kill is cut."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, dict] = {}
        whole = 0
        if path.is_file():
            with open(path, "rb") as f:
                for line in f:
                    if not line.endswith(b"\n"):
                        break
                    row = json.loads(line)
                    self.rows[row["prediction"]["question_id"]] = row
                    whole += len(line)
        self._file = open(path, "ab")  # noqa: SIM115 — open as long as the journal
        self._file.truncate(whole)

    def add(self, row: dict) -> None:
        self.rows[row["prediction"]["question_id"]] = row
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
