"""The expanded weight and what records its gradient. Knows no module of this package above it."""
