"""Which sample each row of a tensor belongs to. How a layer's input holds the samples, where its shape
leaves that open: `tracking`. Whose the rows of any tensor are, in a forward that gathers rows by its data:
`gathered.owners`, which answers with a `provenance`. Whether samples interact: `proof`. Runs on trial, which
leave no trace: `snapshot`.
"""
