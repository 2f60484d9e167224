"""The rules of docs/decoding.md in plain loops, used by the tests only.

Written from that page alone, by somebody who did not look at the engine, and importing nothing from it: the
tests hold the engine's decoders against these. There is no cache, no batching; every iteration asks for the
logits of the whole window (all blocks up to the end of the current one) and uses the last block's rows.

`step_threshold`, `step_joint` and `step_indel` do one iteration on a `Block` with given logits, so that tests
can script the logits one step at a time; `generate` runs a whole request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from naive_model import NaiveModel

Logits = Callable[[list[int]], torch.Tensor]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class NaiveResult:
    canvas: list[int]  # prompt and whole blocks; a position that is still masked holds the mask id
    token_ids: list[int]
    text: str | None
    commits: list[int]  # how many masked positions took a candidate, for each iteration of all blocks
    iterations: int


@dataclass(frozen=True)
class Rules:
    """Everything a step has to know about the request."""

    block_length: int
    mask_id: int
    eos_ids: frozenset[int] = frozenset()
    threshold: float = 0.95
    edit_threshold: float = 0.0
    iterations: int | None = None
    max_post_iterations: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    eos_early_stop: bool = False
    delete_id: int | None = None
    split_id: int | None = None


@dataclass(frozen=True)
class Cell:
    """A position: its token (the mask id while masked); `original` masks are there from the start."""

    token: int
    masked: bool = False
    original: bool = False


@dataclass
class Block:
    """The current block, and what its decoding so far has to remember."""

    cells: list[Cell]
    fixed: int  # how many positions at the start belong to the prompt
    iteration: int = 0
    post: int = 0
    seen: set[tuple[tuple[int, bool], ...]] = field(default_factory=set)
    written: dict[int, set[int]] = field(default_factory=dict)

    @classmethod
    def fresh(cls, prompt_tail: list[int], rules: Rules) -> Block:
        cells = [Cell(token) for token in prompt_tail]
        while len(cells) < rules.block_length:
            cells.append(Cell(rules.mask_id, masked=True, original=True))
        return cls(cells, len(prompt_tail))

    def tokens(self) -> list[int]:
        return [cell.token for cell in self.cells]

    def masks(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell.masked]

    def original_masks(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell.masked and cell.original]


@dataclass(frozen=True)
class Step:
    """What one iteration did."""

    commits: list[int]
    edits: list[int]
    finished: bool


@dataclass(frozen=True)
class Proposal:
    token: int
    confidence: float


# Proposals


def best_token(row: list[float], banned: set[int]) -> int:
    best = -1
    for token, value in enumerate(row):
        if token not in banned and (best < 0 or value > row[best]):
            best = token
    return best


def filtered(logits: torch.Tensor, rules: Rules, banned: set[int]) -> list[float]:
    """The distribution that is drawn from at a temperature above 0; zero for what the filters drop."""
    scaled: list[float] = (logits / rules.temperature).tolist()
    order = sorted((t for t in range(len(scaled)) if t not in banned), key=lambda t: (-scaled[t], t))
    if 0 < rules.top_k < len(order):
        smallest = scaled[order[rules.top_k - 1]]
        order = [t for t in order if scaled[t] >= smallest]
    probabilities = softmax_of(scaled, order)
    if rules.top_p < 1.0:
        kept: list[int] = []
        before = 0.0
        for token in order:
            if kept and before > rules.top_p:
                break
            kept.append(token)
            before += probabilities[token]
        probabilities = softmax_of(scaled, kept)
    return probabilities


def softmax_of(scaled: list[float], kept: list[int]) -> list[float]:
    row = torch.full((len(scaled),), float("-inf"), dtype=torch.float32)
    for token in kept:
        row[token] = scaled[token]
    probabilities: list[float] = torch.softmax(row, dim=-1).tolist()
    return probabilities


def draw(probabilities: list[float], number: float) -> int:
    total = 0.0
    for probability in probabilities:
        total += probability
    target = number * total
    reached = 0.0
    last = -1
    for token, probability in enumerate(probabilities):
        reached += probability
        if reached > target:
            return token
        if probability > 0.0:
            last = token
    return last  # only where rounding ate the difference


def propose(logits: torch.Tensor, rules: Rules, numbers: list[float], banned: set[int]) -> list[Proposal]:
    """One candidate and its confidence for each row of the block's logits [block_length, vocab]."""
    proposals: list[Proposal] = []
    for i in range(logits.shape[0]):
        row = logits[i].to(torch.float32)
        if rules.temperature == 0:
            token = best_token(row.tolist(), banned)
            proposals.append(Proposal(token, float(torch.softmax(row, dim=-1)[token])))
        else:
            probabilities = filtered(row, rules, banned)
            token = draw(probabilities, numbers[i])
            proposals.append(Proposal(token, probabilities[token]))
    return proposals


# Quota, commits and edits


def quota(rules: Rules, iteration: int) -> int:
    iterations = rules.block_length if rules.iterations is None else rules.iterations
    if iteration >= iterations:
        return rules.block_length
    extra = 1 if iteration < rules.block_length % iterations else 0
    return rules.block_length // iterations + extra


def commits_of(masks: list[int], proposals: list[Proposal], threshold: float, floor: int) -> list[int]:
    confident = [i for i in masks if proposals[i].confidence > threshold]
    if len(confident) >= floor:
        return confident
    ranked = sorted(masks, key=lambda i: (-proposals[i].confidence, i))
    return sorted(ranked[: min(floor, len(masks))])


def edits_of(block: Block, proposals: list[Proposal], edit_threshold: float) -> list[int]:
    edits: list[int] = []
    for i, cell in enumerate(block.cells):
        if i < block.fixed or cell.masked or proposals[i].token == cell.token:
            continue
        if proposals[i].confidence > edit_threshold:
            edits.append(i)
    return edits


# One iteration of each decoder; each changes the block in place


def step_threshold(block: Block, logits: torch.Tensor, rules: Rules, numbers: list[float]) -> Step:
    proposals = propose(logits, rules, numbers, {rules.mask_id})
    commits = commits_of(block.masks(), proposals, rules.threshold, quota(rules, block.iteration))
    block.iteration += 1
    for i in commits:
        block.cells[i] = Cell(proposals[i].token)
    finished = not block.masks() or (rules.eos_early_stop and text_is_complete(block, rules))
    return Step(commits, [], finished)


def text_is_complete(block: Block, rules: Rules) -> bool:
    """Was an end of text committed in the block with no mask before it?"""
    for i in range(block.fixed, len(block.cells)):
        if block.cells[i].masked:
            return False
        if block.cells[i].token in rules.eos_ids:
            return True
    return False


def step_joint(block: Block, logits: torch.Tensor, rules: Rules, numbers: list[float]) -> Step:
    proposals = propose(logits, rules, numbers, {rules.mask_id})
    began_without_masks = not block.masks()
    commits = commits_of(block.masks(), proposals, rules.threshold, 1)
    edits = edits_of(block, proposals, rules.edit_threshold)
    block.iteration += 1
    for i in commits + edits:
        block.cells[i] = Cell(proposals[i].token)
    if began_without_masks:
        block.post += 1
    finished = began_without_masks and not edits
    if not block.masks() and block.post >= rules.max_post_iterations:
        finished = True
    return Step(commits, edits, finished)


def step_indel(block: Block, logits: torch.Tensor, rules: Rules, numbers: list[float]) -> Step:
    number = block.iteration
    block.iteration += 1
    masks, originals = block.masks(), block.original_masks()
    final = number >= rules.block_length + rules.max_post_iterations
    if not originals:
        block.post += 1
        final = final or block.post >= rules.max_post_iterations

    banned = {rules.mask_id}
    if final:
        banned |= {token for token in (rules.delete_id, rules.split_id) if token is not None}
    proposals = propose(logits, rules, numbers, banned)

    iterations = rules.block_length if rules.iterations is None else rules.iterations
    if final or not originals or number >= iterations:
        commits = masks
    else:
        floor = quota(rules, number) + len(masks) - len(originals)
        commits = commits_of(masks, proposals, rules.threshold, floor)
    edits = edits_of(block, proposals, rules.edit_threshold)
    if not commits and not edits:
        return Step([], [], finished=True)

    taking = sorted(commits + edits)
    state = tuple((cell.token, cell.masked) for cell in block.cells)
    if state in block.seen and not final:
        weakest = min(taking, key=lambda i: (proposals[i].confidence, i))
        excluded = block.written.get(weakest, set()) | {rules.mask_id}
        token = best_token(logits[weakest].to(torch.float32).tolist(), excluded)
        proposals[weakest] = Proposal(token, proposals[weakest].confidence)
    block.seen.add(state)
    block.cells = rewritten(block, taking, proposals, rules)
    return Step(commits, edits, final)


def rewritten(block: Block, taking: list[int], proposals: list[Proposal], rules: Rules) -> list[Cell]:
    """The block's cells after the positions in `taking` took their candidates."""
    introduced = Cell(rules.mask_id, masked=True, original=False)
    cells = list(block.cells[: block.fixed])
    for i in range(block.fixed, len(block.cells)):
        if i not in taking:
            cells.append(block.cells[i])
            continue
        token = proposals[i].token
        block.written.setdefault(i, set()).add(token)
        if token == rules.delete_id:
            continue
        if token == rules.split_id:
            cells += [introduced, block.cells[i]]
        else:
            cells.append(Cell(token))
    while len(cells) < rules.block_length:
        cells.append(introduced)
    return cells[: rules.block_length]


STEPS: dict[str, Callable[[Block, torch.Tensor, Rules, list[float]], Step]] = {
    "threshold": step_threshold,
    "joint": step_joint,
    "indel": step_indel,
}


# The whole request


def answer_of(
    generated: list[int], eos_ids: set[int], max_tokens: int, stop: tuple[str, ...], decode: Decode | None
) -> tuple[list[int], str | None, bool]:
    """The answer's ids, its text, and whether an end of text or a stop string ended it."""
    ended = False
    answer: list[int] = []
    for token in generated[:max_tokens]:
        answer.append(token)
        if token in eos_ids:
            ended = True
            break
    if decode is None:
        return answer, None, ended
    text = decode(answer)
    for end in range(1, len(text) + 1):
        begins = [end - len(string) for string in stop if text[:end].endswith(string)]
        if begins:
            count = 0
            while not any(string in decode(answer[:count]) for string in stop):
                count += 1
            return answer[:count], text[: min(begins)], True
    return answer, text, ended


def generate(
    model: NaiveModel | None,
    prompt: list[int],
    *,
    decoder: str,
    block_length: int,
    mask_id: int,
    eos_ids: set[int],
    threshold: float,
    edit_threshold: float,
    iterations: int | None,
    max_post_iterations: int,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: tuple[str, ...] = (),
    decode: Decode | None = None,
    ignore_eos: bool = False,
    eos_early_stop: bool = False,
    delete_id: int | None = None,
    split_id: int | None = None,
    logits: Logits | None = None,
) -> NaiveResult:
    ending = set() if ignore_eos else eos_ids
    rules = Rules(
        block_length=block_length,
        mask_id=mask_id,
        eos_ids=frozenset(ending),
        threshold=threshold,
        edit_threshold=edit_threshold,
        iterations=iterations,
        max_post_iterations=max_post_iterations,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_early_stop=eos_early_stop,
        delete_id=delete_id,
        split_id=split_id,
    )

    def window_logits(tokens: list[int]) -> torch.Tensor:
        if logits is not None:
            return logits(tokens)
        if model is None:
            raise ValueError("either a model or logits must be given")
        return model.logits(tokens, block_length)

    generator = torch.Generator().manual_seed(seed)
    first = len(prompt) // block_length
    end = -(-(len(prompt) + max_tokens) // block_length)
    canvas = prompt[: first * block_length]
    commits: list[int] = []
    for number in range(first, end):
        block = Block.fresh(prompt[number * block_length :], rules)
        finished = False
        while not finished:
            rows = window_logits(canvas + block.tokens())[len(canvas) :]
            numbers = torch.rand(block_length, generator=generator, dtype=torch.float64).tolist()
            step = STEPS[decoder](block, rows, rules, numbers)
            commits.append(len(step.commits))
            finished = step.finished
        canvas = canvas + block.tokens()
        if answer_of(canvas[len(prompt) :], ending, max_tokens, stop, decode)[2]:
            break
    token_ids, text, _ = answer_of(canvas[len(prompt) :], ending, max_tokens, stop, decode)
    return NaiveResult(canvas, token_ids, text, commits, len(commits))
