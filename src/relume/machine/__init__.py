"""What this computer has, and how torch's threads behave on it."""
