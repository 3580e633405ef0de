"""The expanded weight and what records its gradient. Imports `torch_api` and nothing else of this package."""
