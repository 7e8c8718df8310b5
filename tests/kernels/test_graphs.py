"""Steps replayed from a recording against steps run one by one. On a CPU the recording is a list of torch's operations: as in a CUDA graph no line of the
runner is run again, and every tensor is read and written where it lay. What CUDA alone can show is marked ``gpu``."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from assay.kernels import engine
from assay.kernels.graphs import ROUND, GraphRunner
from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.generate import generate
from assay.ops.decode.session import Session
from assay.ops.decode.weights import weights_of
from assay.ops.quantize.grid import Format, quantize

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # for time; tests of the ops themselves check them
TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
NEEDS_CUDA = "needs a CUDA device; the same code is tested on a CPU with a list of operations for the graph"


@pytest.fixture
def llama(make_llama):
    return make_llama(layers=2)


class Operations(TorchDispatchMode):
    """Every operation of torch that runs inside, with what it was given and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.seen.append((operation, args, kwargs or {}, found))
        return found


class Recorder:
    """Records a call as the operations that it made, and counts what it recorded and replayed, by width."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, work, device):
        with Operations() as operations:
            output = work()
        self.captured.append(output.shape[1])

        def replay():
            self.replayed.append(output.shape[1])
            made = {}  # what each tensor of the recording is this time; those that it did not make are themselves

            def current(value):
                if isinstance(value, list | tuple):
                    return [current(each) for each in value]
                return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

            for operation, args, kwargs, before in operations.seen:
                now = operation(*current(args), **{name: current(value) for name, value in kwargs.items()})
                several = isinstance(now, list | tuple)
                made.update(zip(map(id, before), now, strict=True) if several else [(id(before), now)])
            return output.copy_(made[id(output)])

        return replay


def eager(work, device):
    """A call made again each time: for a device whose tensors cannot be recorded."""
    return work


def both(model, **more) -> tuple[TorchRunner, GraphRunner, Recorder]:
    plain, recorder = TorchRunner(*weights_of(model), **more), Recorder()
    return plain, GraphRunner(plain, capture=recorder, name="recorded"), recorder


def close(found, expected, tolerance=1e-4):
    assert found.shape == expected.shape
    assert not len(found) or (found - expected).abs().max() < tolerance


@pytest.mark.parametrize(("name", "kv_format"), [("llama", None), ("gemma3", "int8"), ("mixtral with a window", None)])
def test_replayed_steps_give_the_logits_of_steps_run_one_by_one(make_decoder, name, kv_format):
    plain, graphs, recorder = both(make_decoder(name, num_hidden_layers=2))
    sessions = [Session(runner, rows=3, capacity=40, kv_format=kv_format) for runner in (plain, graphs)]
    for session in sessions:
        session.read([TEXT[:20], TEXT[20:23], TEXT[:1]], keep=0)
    place, kept = 30, []
    # Alike, ragged, with rows that wait, with some logits kept; widths come again with other numbers in them.
    for counts, keep, back in (
        ([1, 1, 1], [1, 1, 1], [0, 0, 0]), ([3, 1, 2], [3, 1, 1], [2, 0, 1]), ([1, 0, 1], [1, 0, 1], [0, 0, 0]),
        ([0, 3, 0], [0, 2, 0], [0, 1, 0]), ([3, 3, 3], [3, 3, 3], [0, 3, 1]), ([1, 1, 1], [1, 1, 1], [0, 0, 0]),
    ):  # fmt: skip
        ids = [[TEXT[(place + row + at) % 40] for at in range(count)] for row, count in enumerate(counts)]
        expected, found = (session.read(ids, keep=keep) for session in sessions)
        for one, other in zip(found, expected, strict=True):
            close(one, other, 1e-4 if kv_format is None else 1.0)
        kept.append((found, [each.clone() for each in found]))
        for session in sessions:
            session.rollback(back)
        place += 3
    assert sessions[0].lengths == sessions[1].lengths
    assert recorder.captured == [1, 3] and recorder.replayed == [1, 3, 1, 3, 3, 1]
    assert all(one.equal(copy) for found, copies in kept for one, copy in zip(found, copies, strict=True)), "logits were overwritten later"


def test_a_step_of_more_than_sixteen_tokens_a_row_is_not_recorded(llama):
    plain, graphs, recorder = both(llama)
    expected, found = (Session(runner, rows=2, capacity=40) for runner in (plain, graphs))
    for ids in ([TEXT[:17], [5]], [TEXT[:16], [6]], [TEXT[:17], []]):
        for one, other in zip(found.read(ids), expected.read(ids), strict=True):
            close(one, other)
        back = [len(ids[0]), 0]
        found.rollback(back), expected.rollback(back)
    assert recorder.captured == recorder.replayed == [16]


@pytest.mark.parametrize(
    "capacity", [ROUND - 1, ROUND]
)  # a slab with no more than the spare slot behind it, and one where that would be outside
def test_a_text_that_fills_its_cache_stays_whole_while_others_go_on(llama, capacity):
    plain, graphs, recorder = both(llama)
    text = TEXT * 2
    sessions = [Session(runner, rows=2, capacity=capacity) for runner in (plain, graphs)]
    for session in sessions:
        session.read([text[:capacity], TEXT[:3]])
        for tokens in ([7, 8], [9, 10], [11, 12]):
            session.read([[], tokens])  # the full row has no slot for entries that are no tokens
        session.rollback([2, 0])
    expected, found = (session.read([text[capacity - 2 : capacity], [10, 11]], keep=2) for session in sessions)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    with pytest.raises(ValueError, match=f"room for {capacity}"):
        sessions[1].read([[1], []])
    assert recorder.captured == [3, 2]


def test_a_cache_is_recorded_for_itself_and_its_memory_is_taken_up_by_the_next_of_its_size(llama):
    plain, graphs, recorder = both(llama)

    def logits(runner, capacity, rows=1):
        session = Session(runner, rows=rows, capacity=capacity)
        session.read([TEXT[:20]] * rows)
        return session, session.read([[5]] * rows)[0]

    first, one = logits(graphs, 30)
    second, _ = logits(graphs, 30)  # while the first is still held
    assert recorder.captured == [1, 1]
    assert first.cache.keys.data_ptr() != second.cache.keys.data_ptr()
    for session in (first, second):
        session.cache.values.fill_(torch.nan)
    address = first.cache.keys.data_ptr()
    del first, second, session
    third, other = logits(graphs, 40)  # nearly the same size: the same graph, over memory without what lay there
    assert recorder.captured == [1, 1] and other.equal(one)
    assert third.cache.capacity == 40 and third.lengths == [21]
    fourth, other = logits(graphs, 40)
    assert other.equal(one)
    assert address in (third.cache.keys.data_ptr(), fourth.cache.keys.data_ptr())
    assert recorder.captured == [1, 1]
    close(logits(graphs, ROUND)[1], logits(plain, ROUND)[1])  # a larger one, and one of more rows
    logits(graphs, 30, rows=2)
    assert recorder.captured == [1, 1, 1, 1]
    assert third.cache.size_bytes == plain.cache(rows=1, capacity=40).size_bytes


def test_generation_is_that_of_the_plain_runner_and_records_once(llama):
    plain, graphs, recorder = both(llama)
    prompts = [TEXT[:20], TEXT[3:30]]
    expected = [each.tokens for each in generate(plain, prompts, max_new_tokens=12)]
    for _ in range(2):
        assert [each.tokens for each in generate(graphs, prompts, max_new_tokens=12)] == expected
    assert recorder.captured == [1] and recorder.replayed == [1] * 22


def test_greedy_decoding_on_the_device_gives_the_tokens_of_greedy_decoding_step_by_step(llama):
    plain, graphs, recorder = both(llama)
    prompts = [TEXT[:20], TEXT[3:30], TEXT[5:25]]
    expected = [each.tokens for each in generate(plain, prompts, max_new_tokens=14, vocabulary=100)]
    assert len({token for tokens in expected for token in tokens}) > 10
    session = Session(graphs, rows=3, capacity=ROUND - 1)
    start = [int(logits[0, :100].argmax()) for logits in session.read(prompts)]
    assert start == [tokens[0] for tokens in expected]
    # In pieces, the last with a row that waits and one that is read by a plain step in between.
    first = graphs.decode_greedy(session.cache, start, 8, vocabulary=100)
    assert first.tolist() == [tokens[1:9] for tokens in expected]
    assert session.lengths == [28, 35, 28]
    last = first[:, -1].tolist()
    second = graphs.decode_greedy(session.cache, [last[0], None, last[2]], 5, vocabulary=100)
    assert second.tolist() == [expected[0][9:], [-1] * 5, expected[2][9:]]
    assert session.lengths == [33, 35, 33]
    close(session.read([[], [last[1]], []])[1], Session(plain, capacity=48).read([prompts[1] + expected[1][:9]])[0])
    assert recorder.captured == [1]


def test_greedy_decoding_never_looks_at_a_value(make_decoder):
    # Under "meta" every tensor is a shape alone, so that a look at one would fail, as waiting for a device would take time.
    runner = TorchRunner(*weights_of(make_decoder("gemma3").to("meta")), device="meta")
    graphs = GraphRunner(runner, capture=eager)
    cache = graphs.cache(rows=2, capacity=16)
    assert graphs.decode_greedy(cache, [5, None], 10, vocabulary=100).shape == (2, 10)
    assert cache.counts == [10, 0]
    step = cache.append([[1, 2], [3]], keep=[1, 1])
    assert graphs.forward(cache, step).shape == (2, 128)


def test_what_cannot_be_decoded_is_refused_and_nothing_has_changed(llama):
    _, graphs, recorder = both(llama)
    cache = graphs.cache(rows=2, capacity=8)
    for ids, count, message in (
        ([1], 3, "3 tokens after 1 ids"),
        ([1, 2], 0, "0 tokens after 2 ids"),
        ([None, 2], 9, "row 1 holds 0 .* 9 more"),
    ):
        with pytest.raises(ValueError, match=message):
            graphs.decode_greedy(cache, ids, count)
    assert cache.counts == [0, 0] and not recorder.captured
    for settings, message in (({"rows": 0, "capacity": 5}, "0 rows and 5 tokens"), ({"rows": 2, "capacity": 0}, "2 rows and 0 tokens")):
        with pytest.raises(ValueError, match=message):
            graphs.cache(**settings)
    with pytest.raises(ValueError, match="'fp4' is not stored here"):
        graphs.cache(rows=1, capacity=5, format="fp4")


def packed(weights, bits):
    """The same weights with every linear map of the blocks rounded to ``bits``."""

    def rounded(matrix):
        return matrix._replace(weight=quantize(matrix.weight, Format("int", bits, 32, symmetric=True)))

    blocks = tuple(
        block._replace(
            **{name: rounded(getattr(block, name)) for name in "qkvo"}, mlps=tuple(type(mlp)(*map(rounded, mlp)) for mlp in block.mlps)
        )
        for block in weights.blocks
    )
    return weights._replace(blocks=blocks)


@pytest.mark.parametrize(
    ("bits", "path"),
    [
        (None, "cuda graph bfloat16, float32 weights"),
        (4, "cuda graph bfloat16, int4 triton+bfloat16 weights"),
        (3, "cuda graph bfloat16, int4 triton from int3+bfloat16 weights"),
    ],
)
def test_the_path_on_cuda_says_what_multiplies(llama, bits, path):
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64, or comes with torch for CUDA")
    shape, weights = weights_of(llama)
    build = partial(engine._on_cuda, shape, weights if bits is None else packed(weights, bits), torch.bfloat16, torch.device("cpu"))
    assert build().path == path


def test_without_triton_the_path_says_so(llama, monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    shape, weights = weights_of(llama)
    runner = engine._on_cuda(shape, packed(weights, 4), torch.bfloat16, torch.device("cpu"))
    assert runner.path == "cuda graph without triton, bfloat16, int4+float32 weights"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_on_cuda_the_engine_gives_the_logits_of_torch_and_decodes_without_waiting(make_decoder, bits):
    shape, weights = weights_of(make_decoder("gemma3"))
    weights = weights if bits is None else packed(weights, bits)
    plain, graphs = TorchRunner(shape, weights), engine.runner_of(shape, weights, device="cuda")
    assert isinstance(graphs, GraphRunner) and graphs.path.startswith("cuda graph float32")
    sessions = [Session(runner, rows=2, capacity=100) for runner in (plain, graphs)]
    for ids in ([TEXT * 2, TEXT[:3]], [[5], [6]], [[7, 8, 9], [4]], [[], [1]], [[3], [2]]):
        keep = [len(new) for new in ids]
        for one, other in zip(*(session.read(ids, keep=keep) for session in sessions), strict=True):
            close(other.cpu(), one, 1e-3)
    graphs.decode_greedy(sessions[1].cache, [5, 6], 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = graphs.decode_greedy(sessions[1].cache, [7, 8], 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sessions[0].read([[5], [6]])
    expected, ids = [], [7, 8]
    for _ in range(4):
        ids = [int(logits.argmax()) for logits in sessions[0].read([[token] for token in ids])]
        expected.append(ids)
    assert found.T.tolist() == expected
