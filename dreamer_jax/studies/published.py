"""What "Thinking Deeper, Not Longer" reports: accuracies by task depth and thinking steps (Figures 1 to 3) and Table
1."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A figure of the paper.

    Attributes:
        figure: its number.
        unit: what depths are counted in.
        trained_depths: of training, from and to (section 4).
        trained_steps: T of training, from and to (Table 2).
        steps: T of each column.
        accuracy: depth -> a number for each T.
    """

    figure: int
    unit: str
    trained_depths: tuple[int, int]
    trained_steps: tuple[int, int]
    steps: tuple[int, ...]
    accuracy: dict[int, tuple[float, ...]]


PUBLISHED = {
    "graph": Published(
        1,
        "hops",
        (1, 5),
        (5, 8),
        (1, 2, 3, 5, 8, 12, 15, 20),
        {
            1: (0.97, 0.97, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
            2: (0.51, 0.98, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
            3: (0.51, 0.54, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
            4: (0.52, 0.54, 0.50, 1.00, 1.00, 1.00, 1.00, 1.00),
            6: (0.50, 0.52, 0.50, 0.50, 1.00, 1.00, 1.00, 1.00),
            8: (0.51, 0.54, 0.50, 0.50, 0.50, 0.97, 1.00, 1.00),
            10: (0.51, 0.52, 0.50, 0.50, 0.50, 0.50, 0.50, 0.50),
            12: (0.51, 0.53, 0.50, 0.50, 0.50, 0.50, 0.50, 0.50),
        },
    ),
    "boolean": Published(
        2,
        "nesting",
        (1, 8),
        (4, 16),
        (1, 2, 4, 6, 8, 10, 12, 16, 20, 24),
        {
            2: (0.59, 0.82, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
            4: (0.54, 0.74, 0.94, 0.99, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
            6: (0.56, 0.67, 0.91, 0.97, 0.98, 0.99, 0.99, 1.00, 0.99, 0.99),
            8: (0.58, 0.73, 0.90, 0.96, 0.98, 0.97, 0.97, 0.98, 0.97, 0.97),
            10: (0.58, 0.64, 0.82, 0.88, 0.92, 0.93, 0.94, 0.96, 0.95, 0.94),
            12: (0.58, 0.66, 0.85, 0.89, 0.92, 0.93, 0.93, 0.92, 0.93, 0.92),
            14: (0.54, 0.67, 0.82, 0.89, 0.91, 0.92, 0.90, 0.91, 0.90, 0.90),
        },
    ),
    "family": Published(
        3,
        "links",
        (2, 5),
        (1, 12),
        (1, 2, 4, 6, 8, 10, 12, 16, 20),
        {
            2: (0.80, 0.86, 0.86, 0.86, 0.86, 0.86, 0.86, 0.86, 0.86),
            3: (0.72, 0.83, 0.84, 0.83, 0.84, 0.83, 0.83, 0.83, 0.82),
            4: (0.66, 0.81, 0.83, 0.83, 0.83, 0.82, 0.83, 0.82, 0.82),
            5: (0.64, 0.79, 0.81, 0.82, 0.82, 0.82, 0.82, 0.81, 0.81),
            6: (0.54, 0.66, 0.68, 0.69, 0.69, 0.69, 0.69, 0.69, 0.69),
            7: (0.53, 0.63, 0.65, 0.66, 0.67, 0.67, 0.67, 0.67, 0.67),
            8: (0.46, 0.51, 0.52, 0.53, 0.54, 0.55, 0.55, 0.57, 0.57),
            9: (0.45, 0.49, 0.52, 0.53, 0.53, 0.54, 0.54, 0.55, 0.56),
        },
    ),
}
"""Task -> its figure."""

TABLE_1 = {
    "loss at the last step": {"shortcut": 0.50, "far": 1.00},
    "loss at every step": {"shortcut": 0.73, "far": 0.50},
}
"""Where the loss is -> accuracy of 12 hops after one step, which can't see so far; and of 8 hops after enough steps."""
