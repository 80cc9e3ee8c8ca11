"""What may follow <tool_call>, as vLLM's structured outputs want it: a call that can be parsed.

Text before a call, answers and memories stay free. Whether to call is the policy's choice, so is
the query; only how a call is written is not.
"""

import json

from memsearcher.agent.parsing import TOOLS


def _only(**properties: dict) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_BLANK = {"type": "regex", "pattern": "[ \\n]?"}
# without escapes, and without "<": a query that holds </tool_call> would end the call too early
_SHORT = _only(query={"type": "string", "pattern": r'^[^"\\<\x00-\x1f]+$'})
_FULL = _only(name={"const": TOOLS[0]}, arguments=_SHORT)
_CALL = {"type": "json_schema", "json_schema": {"anyOf": [_SHORT, _FULL]}}
STRUCTURAL_TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [
                {
                    "begin": "<tool_call>",
                    "content": {"type": "sequence", "elements": [_BLANK, _CALL, _BLANK]},
                    "end": "</tool_call>",
                }
            ],
        },
    }
)
