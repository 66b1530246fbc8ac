"""Colors by role, for the light and the dark page."""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "css_variables"]

LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "ink": "#1b2330", "muted": "#586374", "faint": "#8a94a3",
    "grid": "#e4e8ee", "line": "#d3d9e2", "soft": "#eef2f8", "on": "#ffffff",
    "series1": "#2563c9", "series2": "#d9730d", "series3": "#11857a", "series4": "#8a4fc4",
    "series5": "#c43a5e", "series6": "#8f7210", "pale1": "#c9dbf7", "pale3": "#bfe3de",
    "alert": "#b3261e",
}  # fmt: skip
DARK = {
    "page": "#0f1318", "card": "#171d25", "ink": "#e8ecf2", "muted": "#a3adba", "faint": "#76818f",
    "grid": "#27303b", "line": "#343f4c", "soft": "#1f2732", "on": "#0f1318",
    "series1": "#6ea8fe", "series2": "#f2a65a", "series3": "#4fc4b5", "series4": "#b993f0",
    "series5": "#f0809c", "series6": "#d3b75a", "pale1": "#28436e", "pale3": "#1d4f4a",
    "alert": "#ff8f87",
}  # fmt: skip


def css_variables(palette: dict[str, str]) -> str:
    """Return declarations of the colors as CSS variables."""
    return "".join(f"--{role}:{color};" for role, color in palette.items())
