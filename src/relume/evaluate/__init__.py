"""How good a model is: tasks with one right answer, and the scores of its answers."""
