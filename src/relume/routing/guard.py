"""How small a coreset may be before group-limited routing runs out of it."""

from __future__ import annotations

from functools import cache


@cache
def legal_guard(num_experts: int, top_k: int, num_groups: int, kept_groups: int) -> int:
    """The least size at which every coreset leaves every token `top_k` legal experts, whatever its scores.

    An expert is legal for a token if it lies in the coreset and in a group that the token keeps (see
    `keep_groups`, with scores of -inf outside the coreset). A group's score is the sum of its two best, so one
    with fewer than two coreset experts scores -inf: it is *poor*, the others are *rich*. Rich groups are kept
    before poor ones, in an order that scores can make any; poor ones by their number, so empty ones may be first.

    Taking an expert out of a group that a token drops leaves it as many legal ones, and if none is dropped all are
    legal; so if a size is too small, every smaller one is, and the answer is the largest size that fails, plus 1.
    A coreset of that size fails in one of two ways:

    - at least `kept_groups` are rich: those that a token keeps hold less than `top_k`, the others may be full;
    - fewer are rich: all of those are kept, and poor ones, of which the empty come first and the rest hold one.

    It is 12 for LLaDA2's 256 experts in 8 groups, 4 of them kept, and a top-k of 8.
    """
    size = num_experts // num_groups
    if num_groups == 1 or size == 1:
        return top_k  # any coreset expert is legal: a group of one is never poor
    most = top_k - 1  # legal experts when it fails
    largest = most
    for rich in range(num_groups + 1):
        others = num_groups - rich
        if rich >= kept_groups:
            if 2 * kept_groups <= most:
                full = (rich - kept_groups) * size
                largest = max(largest, min(most, kept_groups * size) + full + others)
            continue
        for empty in range(others + 1):
            singles = max(0, kept_groups - rich - empty)  # poor groups that are kept and hold one
            inside = min(rich * size, most - singles)  # experts of the rich groups
            if inside >= 2 * rich:
                largest = max(largest, inside + others - empty)
    return largest + 1
