"""Which sample each row of a tensor belongs to: layouts, gathered rows, the proof, runs on trial."""
