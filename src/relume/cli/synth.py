"""`relume synth`."""


def synth(out: str) -> None:
    """Placeholder until the job lands."""
