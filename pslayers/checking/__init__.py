"""What `check_model` is made of: the samples of a call, its loss, runs on trial, comparisons."""
