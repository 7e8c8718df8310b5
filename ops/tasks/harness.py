"""Our engine as a language model of lm-evaluation-harness, so that any of its tasks runs on any variant: packed weights, a KV format, a draft.

Not here: tasks and their scores (the harness, ``packaged.py``), what becomes of them (``ops/suites/choice.py``, ``ops/suites/lm_eval.py``), the loop that
writes texts until a string (``until.py``).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from random import Random
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from assay.ops.decode.drafts import Draft
from assay.ops.decode.runner import Runner, undisturbed
from assay.ops.decode.samples import in_common
from assay.ops.decode.sampling import Sampling, largest
from assay.ops.decode.session import Session
from assay.ops.tasks.until import Asked, write_until

SHARED = 16  # tokens: a beginning of all prompts of a batch that is read once; shorter ones are not worth the copies
TOGETHER = 4096  # tokens: the most in one forward, which holds all their activations
MAX_NEW_TOKENS = 256  # where a task says nothing, as the harness has it
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Scored(NamedTuple):
    """A text to read, and the tokens that its last places are asked about: ``targets`` [t] follow each of the last t of ``ids``."""

    number: int
    ids: list[int]
    targets: list[int]

    @property
    def first(self) -> int:
        """The place of the first that is asked about."""
        return len(self.ids) - len(self.targets)


class Drafting(NamedTuple):
    """What proposes tokens, and how many a round."""

    draft: Draft
    gamma: Any


class EngineLM(TemplateLM):
    """A runner and its tokenizer behind the harness's interface. Answers come in the order of the requests, and none is kept for another model.

    A prompt is read once for all its continuations, and logits are made of the scored places alone. Log-probabilities are of a float32 log-softmax over
    the whole head. A text begins with the tokens that its tokenizer puts there by itself, and with one BOS where a chat template has written it already.

    Args:
        max_length: tokens that the model can have before it; longer texts lose their beginning, and are counted in ``truncated``.
        eos_ids: these end a generated text.
        batch: prompts side by side.
        kv_format: how keys and values are stored; None keeps the runner's own dtype.
        drafting: for generated texts; greedy ones stay what they are.
        seed: with the number of a request, the seed of its draws.
    Attributes:
        truncated: requests that lost their beginning, or windows of rolling ones never.
        cut: generated texts that ended by their length.
        first_ids: of the first text that was read, so that its BOS can be seen.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        *,
        max_length: int,
        eos_ids: Collection[int] = (),
        batch: int = 16,
        kv_format: str | None = None,
        drafting: Drafting | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(max_length, batch) < 1:
            raise ValueError(f"max_length={max_length}, batch={batch}; expected 1 or more of each")
        self.runner, self.tokenizer, self.max_length, self.batch = runner, tokenizer, max_length, batch
        self.eos_ids, self.kv_format, self.drafting, self.seed = frozenset(eos_ids), kv_format, drafting, seed
        self._encode = lru_cache(maxsize=8)(self._encode_anew)  # a context comes again with each of its continuations
        self.truncated, self.cut = 0, 0
        self.first_ids: list[int] = []

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, or the end of text where there is none."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        """Which tokenizer this is."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the tokenizer's chat template writes them; an unfinished answer is gone on with where no new one is to begin.

        Raises:
            ValueError: the tokenizer has no template.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template; expected one, or a protocol with chat: false")
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text. Special tokens are the tokenizer's own choice unless said, and never a BOS before one that the text begins with."""
        return list(self._encode(string, add_special_tokens))

    def _encode_anew(self, string: str, add_special_tokens: bool | None) -> list[int]:
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        return self.tokenizer.encode(string, **({} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-probability in nats, and whether greedy decoding would write it."""
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of each whole text, every token predicted once, from the longest beginning that the model can have."""
        windows: list[Any] = []
        owners: list[int] = []
        for owner, (text,) in enumerate(request.args for request in requests):
            for pair in get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The continuation of each (context, arguments), up to the first of its stops, which is left out.

        ``until`` is a list of whole strings. The number of a request and the seed are its draws, so a text does not depend on its neighbours.

        Raises:
            ValueError: an argument is not understood, or leaves no room for a prompt.
        """
        asked, ways = [], []
        for number, request in enumerate(requests):
            pair: Any = request.args
            context, arguments = pair
            sampling, stops, count = generation(arguments)
            room = self.max_length - count
            if room < 1:
                raise ValueError(f"{count} new tokens leave no room for a prompt in the model's {self.max_length}; ask for fewer")
            ids = self.tok_encode(context) or [self.prefix_token_id]
            self._seen(ids, len(ids) > room)
            generator = torch.Generator(device=self.runner.device).manual_seed(Random(f"{self.seed}/{number}").getrandbits(63))
            asked.append(Asked(ids[-room:], count, stops, generator))
            ways.append(sampling)
        answers: list[str] = [""] * len(asked)
        for sampling in dict.fromkeys(ways):
            mine = [number for number, way in enumerate(ways) if way == sampling]
            written = write_until(
                self.runner, self.tokenizer, [asked[number] for number in mine], sampling=sampling, eos_ids=self.eos_ids, batch=self.batch,
                kv_format=self.kv_format, drafting=self.drafting,
            )  # fmt: skip
            for number, each in zip(mine, written, strict=True):
                answers[number] = each.text
                self.cut += each.cut
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        """As the base class asks: of (strings, context ids, continuation ids)."""
        scored = []
        for number, (_strings, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens cannot be scored by a model of {self.max_length}; expected 1 to that"
                )
            text = [*context, *continuation]
            self._seen(text, len(text) > self.max_length + 1)
            scored.append(Scored(number, text[-(self.max_length + 1) :][:-1], continuation))
        return score(self.runner, scored, batch=self.batch, kv_format=self.kv_format)

    def _seen(self, ids: list[int], truncated: bool) -> None:
        self.first_ids = self.first_ids or ids[:8]
        self.truncated += truncated


@undisturbed
def score(runner: Runner, scored: Sequence[Scored], *, batch: int, kv_format: str | None) -> list[tuple[float, bool]]:
    """The log-probability in nats of each text's targets, and whether each of them is the most likely token, in the order of the texts' numbers.

    Texts that follow one another and begin alike are read together: first what they share, then what each goes on with, in turns.
    """
    groups = [[*group] for _, group in groupby(scored, key=_beginning)]
    groups.sort(key=lambda group: -max(len(each.ids) for each in group))  # texts of one length side by side
    found: dict[int, tuple[float, bool]] = {}
    for start in range(0, len(groups), batch):
        found |= _score_side_by_side(runner, groups[start : start + batch], kv_format)
    return [found[each.number] for each in scored]


def _beginning(each: Scored) -> tuple[int, ...]:
    """Of texts with the same, the prompt is the same: all but what is asked about and the token before it."""
    return tuple(each.ids[: each.first])


def _score_side_by_side(
    runner: Runner, groups: Sequence[Sequence[Scored]], kv_format: str | None
) -> Iterable[tuple[int, tuple[float, bool]]]:
    shared = [in_common([each.ids for each in group]) for group in groups]
    first = [min(each.first for each in group) for group in groups]
    session = Session(runner, rows=len(groups), capacity=max(len(each.ids) for group in groups for each in group), kv_format=kv_format)
    everywhere = min(in_common([group[0].ids for group in groups]), *first, *shared)
    if len(groups) > 1 and everywhere >= SHARED:
        session.read([groups[0][0].ids[:everywhere], *[[]] * (len(groups) - 1)], keep=0)
        session.reorder([0] * len(groups))
    else:
        everywhere = 0
    kept = [length - min(length, begins) for length, begins in zip(shared, first, strict=True)]
    before = _read(session, [group[0].ids[everywhere:length] for group, length in zip(groups, shared, strict=True)], kept)
    found = []
    for turn in range(max(map(len, groups))):
        mine = [group[turn] if turn < len(group) else None for group in groups]
        rest = [each.ids[length:] if each else [] for each, length in zip(mine, shared, strict=True)]
        asked = [len(each.ids) - max(each.first, length) if each else 0 for each, length in zip(mine, shared, strict=True)]
        after = _read(session, rest, asked)
        for row, each in enumerate(mine):
            if each is not None:
                inside = len(each.targets) - asked[row]  # of what is asked, as many places lie in the shared beginning: its last ones
                logits = torch.cat([before[row][len(before[row]) - inside :], after[row]])
                found.append((each.number, _judge(logits, each.targets)))
        session.rollback([len(each) for each in rest])
    return found


def _read(session: Session, ids: Sequence[Sequence[int]], keep: Sequence[int]) -> Sequence[Float[Tensor, "keep vocab"]]:
    """What the session reads, in one forward where that changes no bit: the native decoder's logits do not depend on what is read beside them."""
    native = getattr(session.runner, "has_threads", False)
    if not native or not 0 < sum(map(len, ids)) <= TOGETHER:
        return session.read(ids, keep)
    return session.runner.forward(session.cache, session.cache.append(ids, keep=keep)).split(list(keep))


def _judge(logits: Float[Tensor, "targets vocab"], targets: Sequence[int]) -> tuple[float, bool]:
    best = largest(logits)  # refuses what is not finite
    wanted = torch.tensor(targets, device=logits.device)
    log_probs = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)
    return float(log_probs.double().sum()), bool((best.to(wanted.device) == wanted).all())


def generation(arguments: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...], int]:
    """What a task's generation arguments ask for: how to draw, where to stop, how many tokens at most.

    As in the harness, nothing is drawn unless ``do_sample`` or a temperature says so.

    Raises:
        ValueError: an argument is not known here, or ``until`` is no list of strings.
    """
    left = dict(arguments)
    stops = left.pop("until", None) or []
    if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"until={stops!r}; expected a list of whole strings, such as until: [{str(stops)!r}]")
    counts = [left.pop(name) for name in LENGTHS if left.get(name) is not None]
    count = int(counts[0]) if counts else MAX_NEW_TOKENS
    if count < 1:
        raise ValueError(f"max_gen_toks={count} asks for no token; expected 1 or more")
    draws = left.pop("do_sample", None)
    chosen = {name: left.pop(name) for name in SAMPLING if left.get(name) is not None}
    if left.pop("num_beams", 1) != 1:
        raise ValueError("num_beams is more than 1; texts are written by greedy decoding or by sampling, so leave it out")
    unknown = sorted(name for name in left if name not in (*SAMPLING, *LENGTHS))
    if unknown:
        raise ValueError(
            f"the generation argument {unknown[0]!r} is not understood; there are until, do_sample, {', '.join((*LENGTHS, *SAMPLING))}"
        )
    temperature = float(chosen.pop("temperature", 1.0 if draws else 0.0))
    if draws is False or temperature == 0:
        penalties: dict[str, Any] = {name: float(value) for name, value in chosen.items() if name.endswith("_penalty")}
        return Sampling(temperature=0.0, **penalties), tuple(filter(None, stops)), count
    whole: dict[str, Any] = {name: int(value) if name == "top_k" else float(value) for name, value in chosen.items()}
    return Sampling(temperature=temperature, **whole), tuple(filter(None, stops)), count
