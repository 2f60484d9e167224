"""A clock that charges a decode to a machine that need not be there."""
