"""A Plotly figure as plain data: traces and a layout. Fonts and grids are the page's own."""

from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#3b82c4", "#e07b39", "#3a9d6e", "#b45fb5", "#c9a227", "#6b7a8f", "#c44d58", "#17a2a2")

Plot = dict[str, object]  # a trace or a layout, as Plotly takes it


@dataclass(frozen=True, slots=True)
class Figure:
    """`small`: one of many in a grid."""

    id: str
    title: str
    data: list[Plot]
    layout: Plot
    small: bool = False


def colours(items: Sequence[object]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(items))]
