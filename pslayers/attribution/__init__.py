"""Which sample each row of a tensor belongs to. How a layer's input holds the samples, where its shape
leaves that open: `tracking`. Whose the rows of any tensor are, in a forward that gathers rows by its data:
`gathered.GatheredRows.owners`, which answers with a `provenance.RowProvenance`. Whether samples interact:
`proof`. Runs on trial, which leave no trace: `snapshot`. Rows that the user says whose they are: `ragged`.
"""
