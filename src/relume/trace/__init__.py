"""What each forward did, as arrays, and the one file format that holds it."""
