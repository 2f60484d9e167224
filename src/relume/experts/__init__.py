"""Where experts lie and how their outputs are computed."""
