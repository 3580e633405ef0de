"""What modules of a converted model share: the state of each, containers, the base of layers, first calls."""
