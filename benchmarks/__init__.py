"""Commands that measure pslayers and its peers."""
