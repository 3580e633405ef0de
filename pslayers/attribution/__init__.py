"""Which sample each row of a tensor belongs to: layouts, gathered rows, the proof that samples do not
interact, and runs on trial, which leave no trace.
"""
