"""Tasks about the letters of a word."""

from __future__ import annotations

import random

from relume.tasks.task import Problem
from relume.tasks.words import draw_word


def reverse_word(rng: random.Random) -> Problem:
    """Spell a word backwards."""
    word = draw_word(rng)
    prompt = rng.choice(
        (
            "Reverse the word {}.",
            "Spell {} backwards.",
            "Write {} from back to front.",
            "What is {} spelled backwards?",
        )
    ).format(word)
    return Problem(word, prompt, word[::-1])


def uppercase_words(rng: random.Random) -> Problem:
    """Write one or two words in capitals."""
    words = " ".join(draw_word(rng) for _ in range(rng.choice((1, 1, 2))))
    prompt = rng.choice(
        (
            "Write {} in capital letters.",
            "Put {} in upper case.",
            "Change {} to capitals.",
            "Upper case: {}",
        )
    ).format(words)
    return Problem(words, prompt, words.upper())


def count_letter(rng: random.Random) -> Problem:
    """Count a letter: the word with every other letter struck out, then the total.

    Each position of the first line depends on one letter of the word alone, so a block of it can be decoded at
    once; running counts depend on each other, and tokens committed together would contradict.
    """
    word = draw_word(rng)
    if rng.random() < 0.5:  # make repeats common: words repeat few letters by themselves
        letters = list(word)
        for _ in range(rng.randint(1, 2)):
            letters[rng.randrange(len(letters))] = rng.choice(letters)
        word = "".join(letters)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("aeiourstln")
    marked = "".join(character if character == letter else "-" for character in word)
    prompt = rng.choice(
        (
            "How many times is {letter} in {word}?",
            "Count the letter {letter} in {word}.",
            "How often does {letter} occur in {word}?",
        )
    ).format(letter=letter, word=word)
    return Problem(f"{letter} {word}", prompt, f"{marked}\n{word.count(letter)}")
