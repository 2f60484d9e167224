"""Words for the tasks: common ones, and made-up ones that can be spoken."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COMMON = _words(
    """
    apple arm baby ball bank basket bear bed bell bike bird boat book bottle bread bridge brush bus butter
    button cake camel candle car carpet castle cat chair cheese circle clock cloud coat coffee corn cow cup
    daisy dance desk dog door dragon dream drum duck eagle earth egg engine eye farm feather field finger
    fire fish flag flower forest fork fox friend frog garden gate ghost glass goat gold grape grass guitar
    hammer hand hat heart hill honey horse house ice island jacket jam jewel juice kettle key king kitten
    knee ladder lake lamp leaf lemon letter light lion lock magnet map market meadow milk mirror money moon
    mouse music nail needle nest night nose nut ocean onion orange oven owl paint panda paper parrot pencil
    piano picnic pillow planet plate pocket potato puppet queen rabbit radio rain ribbon ring river road robot
    rocket roof rope rose sail salt sand school shadow shell ship shirt shoe silver snake snow soap sock song
    spider spoon spring star stone storm sugar summer sun table teapot tent thunder tiger tomato towel tower
    train tree trumpet tulip turtle valley violin wagon wall water whale wheel window winter wolf wood yellow
    zebra
    """
)
FRUITS = _words("apple banana cherry fig grape kiwi lemon lime mango melon olive peach pear plum")
COLOURS = _words("black blue brown gold green grey orange pink purple red silver white yellow")
ANIMALS = _words("bear bird camel cat cow dog duck fox frog goat horse lion mouse owl pig sheep tiger wolf")
NAMES = _words("Adam Amy Anna Ben Carl Dana Emma Eva Finn Jack Kate Leo Lily Max Mia Nina Noah Omar Rosa Sam")
ITEMS = _words("apples balls books cakes cards coins cups eggs keys nuts pens plums rings shells stamps")

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def draw_word(rng: random.Random, shortest: int = 3, longest: int = 7) -> str:
    """A common word (one time in three) or a made-up one, within the lengths."""
    if rng.random() < 1 / 3:
        while not shortest <= len(word := rng.choice(COMMON)) <= longest:
            pass
        return word
    length = rng.randint(shortest, longest)
    letters: list[str] = []
    vowel = rng.random() < 0.3
    while len(letters) < length:
        letters.append(rng.choice(_VOWELS if vowel else _CONSONANTS))
        # Now and then two of a kind meet, as in real words.
        vowel = not vowel if rng.random() < 0.85 else vowel
    return "".join(letters)
