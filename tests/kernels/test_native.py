"""The native decoder: its products against torch, its logits against transformers, and that neighbours and cuts change no bit."""

import ctypes
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.kernels import build, native
from assay.kernels.engine import open_runner, runner_of
from assay.kernels.panels import FORMS, panels
from assay.ops.decode.architecture import Architecture
from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.generate import generate
from assay.ops.decode.session import Session
from assay.ops.decode.weights import Block, Matrix, Mlp, Ready, Weights, open_weights, weights_of
from assay.ops.kv.cache import to_e4m3, to_int8_rows
from assay.ops.models import structure
from assay.ops.models.checkpoint import load_model
from assay.ops.quantize.activations import Activations, quantize_activations
from assay.ops.quantize.elements import decode
from assay.ops.quantize.grid import Format, Quantized, Scales, quantize
from assay.ops.quantize.rotate import Online, rotate
from assay.ops.quantize.rtn import rtn
from assay.ops.quantize.runtime import Runtime
from assay.ops.quantize.write import save_packed

pytestmark = pytest.mark.skipif(not native.levels(), reason="no compiler, or neither AVX2 nor AVX-512")
TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = [TEXT, TEXT[7:12], TEXT[20:38]]


@pytest.fixture(params=native.levels())
def level(request):
    return request.param


def product(matrix: Matrix, x, **how):
    """W x + b in float64."""
    y = x.double() @ matrix.dense(torch.float32).double().T
    return y if matrix.bias is None else y + matrix.bias.double()


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)), rows=st.integers(1, 100), groups=st.integers(1, 4), words=st.integers(1, 12), tokens=st.integers(1, 14),
    threads=st.integers(1, 3), symmetric=st.booleans(), biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_shape_are_those_of_torch(form, rows, groups, words, tokens, threads, symmetric, biased, seed):
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * words * 8, generator=random)
    bias = torch.randn(rows, generator=random) if biased else None
    if form.startswith("int"):
        matrix = Matrix(quantize(weight, Format("int", int(form[3:]), words * 8, symmetric=symmetric)), bias)
    elif form == "table4":
        format = Format("nf4", 4, words * 8, scale="float32") if symmetric else Format("e2m1", 4, words * 8, scale="e4m3")
        matrix = Matrix(quantize(weight, format), bias)
    elif form.startswith("e"):
        format = Format(form, 8, words * 8, rows) if symmetric else Format(form, 8, -1, scale="float32")
        matrix = Matrix(quantize(weight, format), bias)
    else:
        matrix = Matrix(weight.to(getattr(torch, form)), bias)
    laid = panels(matrix)
    assert laid.form == form
    x = torch.randn(tokens, weight.shape[1], generator=random)
    for level in native.levels():
        found = native.multiply(laid, x, level=level, threads=threads)
        size = x.abs().double() @ matrix.dense(torch.float32).abs().double().T + 1
        assert ((found - product(matrix, x)).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_any_number(form, level):
    random = torch.Generator().manual_seed(2)
    matrix = native.probe(form, rows=97, cols=192, group=32, generator=random)
    x = torch.randn(200, 192, generator=random)
    whole = native.multiply(panels(matrix), x, level=level)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 96, 97, 130):
        for threads in (1, 2):
            assert native.multiply(panels(matrix), x[-count:], level=level, threads=threads).equal(whole[-count:])


def test_every_code_of_every_width_is_multiplied_exactly(level):
    # One input at a time is 1 and the others 0, so that each output is one weight.
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            codes = (torch.arange(256) % 2**bits + low).to(torch.int8).view(4, 64)
            scales = torch.tensor([[0.5, 3.0], [1.0, 0.125], [2.0**-20, 7.0], [1.5, 1.0]], dtype=torch.bfloat16)
            zeros = None if symmetric else torch.tensor([[low, high], [0, 1], [-1, 0], [high, low]], dtype=torch.int8)
            matrix = Matrix(Quantized(codes, Scales(scales, zeros), Format("int", bits, 32, symmetric=symmetric)))
            assert native.multiply(panels(matrix), torch.eye(64), level=level).T.equal(matrix.dense(torch.float32))


def test_every_code_of_the_tables_and_small_floats_is_multiplied_exactly(level):
    formats = [
        Format("nf4", 4, 32, scale="float32"), Format("e2m1", 4, 32, scale="e8m0"), Format("e2m1", 4, 16, scale="e4m3"), Format("e4m3", 8, 32),
        Format("e5m2", 8, 0), Format("e4m3", 8, 32, 2), Format("ternary", 2, 0),
    ]  # fmt: skip
    for format in formats:
        weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        found = quantize(weight, format)
        codes = torch.arange(256).to(torch.uint8).view(torch.int8).view(4, 64)
        if format.element in ("e4m3", "e5m2"):
            values = decode(codes, format.element)
            codes = torch.where(values.isfinite(), codes, 0)  # a finite weight never becomes one of the others
        else:
            codes = codes % 16 if format.bits == 4 else codes.sign()
        matrix = Matrix(found._replace(codes=codes.to(torch.int8)))
        assert native.multiply(panels(matrix), torch.eye(64), level=level).T.equal(matrix.dense(torch.float32))


@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize(("format", "symmetric"), [("int8", True), ("int8", False), ("int4", True), ("int4", False), ("fp8_e4m3", True)])
def test_inputs_are_rounded_to_the_numbers_that_torch_rounds_them_to(format, symmetric, per, level):
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 40)[:, None]
    x[5], x[6, 3], x[7] = 0, 50, -x[7].abs()
    fixed = {"scale": torch.tensor([0.03]), "zero": None if symmetric else torch.tensor([-3.0])} if per == "tensor" else {}
    how = Activations(format, per, symmetric, clip=0.9 if per == "token" else 1.0, **fixed)
    assert native.make_ready(Ready(activations=how), x, level=level).equal(quantize_activations(x, how))
    x[9, 1] = torch.nan
    found, expected = native.make_ready(Ready(activations=how), x, level=level), quantize_activations(x, how)
    assert found.isnan().equal(expected.isnan()) and found.nan_to_num(0).equal(expected.nan_to_num(0))


@pytest.mark.parametrize(
    ("width", "size", "stride"), [(64, 64, 1), (576, 576, 1), (1536, 1536, 1), (128, 16, 1), (96, 4, 8), (192, 12, 16), (60, 20, 1)]
)
def test_inputs_are_turned_as_torch_turns_them(width, size, stride, level):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(4))
    online = Online("mlp.down_proj", "input", size, stride)
    assert (native.make_ready(Ready(online=online), x, level=level) - online.turn(x)).abs().max() < 2e-6 * x.abs().max() * 10


def test_a_rotated_model_with_rounded_inputs_runs_natively_as_in_torch(tl8, tmp_path, level):
    """Rounding makes a step of what was a hair: the last bits of a sum decide which. So most logits agree closely, and none is far off."""
    transforms = rotate(tl8, online=("down", "heads", "qk"))
    names = list(structure.block_linears(tl8))
    runtime = Runtime(dict.fromkeys(names, Activations("int8")), transforms)
    save_packed(tl8, None, tmp_path, rtn(tl8, Format("int", 8, 32)).layers, runtime=runtime)
    shape, weights = open_weights(tmp_path)
    runner = native.NativeRunner(shape, weights, level=level)
    assert runner.path.endswith("int8+float32 weights, inputs rounded to int8, online rotations")
    found, plain = (Session(each, capacity=40).read([TEXT], keep=40)[0] for each in (runner, TorchRunner(shape, weights)))
    with torch.no_grad():
        assert torch.equal(plain, load_model(tmp_path)(torch.tensor([TEXT])).logits[0])
    assert (found - plain).abs().median() < 0.02 * plain.std() and (found - plain).abs().max() < 0.5 * plain.std()
    session = Session(runner, rows=2, capacity=40)
    assert session.read([TEXT, TEXT[:3]], keep=[40, 1])[0].equal(found)


def test_what_fits_no_lane_runs_in_another_form_that_says_so(tl8):
    weight = torch.randn(8, 36)
    assert panels(Matrix(quantize(weight, Format("int", 4, 12, symmetric=True)))).form == "int8"  # no whole words of eight columns
    assert panels(Matrix(quantize(weight, Format("int", 3, 36, symmetric=True)))).form == "int8"
    assert panels(Matrix(weight[:, :35].bfloat16())).form == "float32"  # an odd number of columns
    assert panels(Matrix(weight.half())).form == "float32"
    exact = quantize(weight, Format("int", 8, 12, symmetric=True))
    other = Matrix(exact._replace(shared=Scales(exact.shared.scales.float() * 1.001)))
    assert (laid := panels(other)).form == "int8" and laid.scales.dtype == torch.float32  # scales that bfloat16 cannot hold
    ordered = Matrix(exact._replace(order=torch.arange(36) % 3))
    assert panels(ordered).form == "float32"  # groups that are not contiguous
    x = torch.randn(3, 36)
    assert torch.allclose(native.multiply(panels(other), x, level=native.levels()[0]), product(other, x).float(), atol=1e-4)
    shape, weights = weights_of(tl8)
    blocks = (weights.blocks[0]._replace(q=Matrix(weights.blocks[0].q.weight.half())), *weights.blocks[1:])
    assert native.NativeRunner(shape, weights._replace(blocks=blocks)).path.endswith("float32, float32+float32 from float16 weights")


def test_nan_and_infinity_are_not_hidden(level):
    for form in FORMS:
        laid = panels(native.probe(form, rows=40, cols=64, group=16, generator=torch.Generator().manual_seed(0)))
        for bad in (float("nan"), float("inf")):
            x = torch.zeros(3, 64)
            x[1, 5] = bad
            found = native.multiply(laid, x, level=level)
            assert not found[1].isfinite().any()
            assert found[[0, 2]].isfinite().all()


def native_decoder(decoder, **more):
    shape, weights = weights_of(decoder)
    if shape.experts:
        pytest.skip("a mixture of experts runs in torch")
    return native.NativeRunner(shape, weights, **more)


def test_logits_are_those_of_transformers(decoder, full_logits, level):
    expected = full_logits(decoder, TEXT)
    found = Session(native_decoder(decoder, level=level, threads=2), capacity=40).read([TEXT], keep=40)[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert expected.std() > 1


def test_neighbours_chunks_threads_and_single_steps_change_no_bit(decoder):
    whole = [Session(native_decoder(decoder, threads=1), capacity=40).read([text], keep=len(text))[0] for text in TEXTS]
    runner = native_decoder(decoder, threads=2)
    session = Session(runner, rows=3, capacity=40)
    for found, expected in zip(session.read(TEXTS, keep=[len(text) for text in TEXTS]), whole, strict=True):
        assert found.equal(expected)
    for chunk in (1, 3, 16):
        assert Session(runner, capacity=40, chunk=chunk).read([TEXT], keep=40)[0].equal(whole[0])
    session = Session(runner, rows=3, capacity=40)
    for index in range(40):
        step = [text[index : index + 1] for text in TEXTS]
        for found, expected, new in zip(session.read(step), whole, step, strict=True):
            assert not new or found[0].equal(expected[index])


def test_after_rollbacks_no_bit_differs(decoder):
    runner = native_decoder(decoder)
    whole = Session(runner, capacity=48).read([TEXT], keep=40)[0]
    session, place = Session(runner, capacity=48), 5
    session.read([TEXT[:5]])
    for back in (0, 1, 2, 3, 4, 0, 4, 3):
        session.read([[*TEXT[place : place + 4 - back], *[60 + back] * back]])
        session.rollback([back])
        place += 4 - back
        assert session.read([TEXT[place : place + 1]])[0][0].equal(whole[place])
        place += 1


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
def test_a_quantized_cache_stores_what_torch_stores(decoder, kv_format):
    runner, reference = native_decoder(decoder), TorchRunner(*weights_of(decoder))
    ours, theirs = (Session(each, rows=2, capacity=24, kv_format=kv_format) for each in (runner, reference))
    for session in (ours, theirs):
        session.read([TEXT[:9], TEXT[3:5]])
    # The first layer sees the same values up to rounding, so nearly every code is the same, and none is further off than one step.
    used = ours.cache.keys[0, 0, :, :9].float(), theirs.cache.keys[0, 0, :, :9].float()
    assert (used[0] == used[1]).float().mean() > 0.98
    assert ((used[0] - used[1]).abs() <= 0.13 * used[1].abs() + 1).all()
    if kv_format == "int8":
        ours_scales, theirs_scales = ours.cache.value_scales[0, 0, :, :9].float(), theirs.cache.value_scales[0, 0, :, :9].float()
        assert ((ours_scales - theirs_scales).abs() <= theirs_scales * 2**-7).all()
    # Reading what is stored: torch goes on from the native cache, and gives the native logits.
    for name in ("keys", "values", "key_scales", "value_scales"):
        if getattr(ours.cache, name) is not None:
            getattr(theirs.cache, name).copy_(getattr(ours.cache, name))
    found, expected = ours.read([[5], [6]]), theirs.read([[5], [6]])
    errors = torch.cat([(one - other).abs() for one, other in zip(found, expected, strict=True)])
    assert errors.median() < 1e-2 * torch.cat(expected).std()


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
def test_the_cache_rounds_each_value_as_the_format_says(tl8, kv_format):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    beyond = [449.0, 464.0, 1e9, -1e9, float("inf"), float("nan")] if kv_format == "fp8_e4m3" else [1e9, float("nan"), 1e-42, 0.0]
    probes = torch.cat([finite, ties, ties * 1.0001, ties * 0.9999, torch.tensor(beyond), torch.zeros(16)])
    probes = (probes[: len(probes) // 16 * 16] + 0.0).view(-1, 16)  # a sum has no negative zero
    expected = to_e4m3(probes).view(torch.int8) if kv_format == "fp8_e4m3" else to_int8_rows(probes).codes
    found = [stored_value(weights_of(tl8)[0], row, kv_format) for row in probes]
    nan = probes.isnan().any(dim=-1) if kv_format == "int8" else torch.zeros(len(probes), dtype=torch.bool)
    assert torch.stack(found)[~nan].equal(expected[~nan])


def stored_value(like: Architecture, row, kv_format):
    """The bytes that a cache holds of ``row``, the bias of the value projection of a decoder whose weights are zeros otherwise."""
    width = len(row)
    shape = like._replace(layers=like.layers[:1], hidden=width, heads=1, kv_heads=1, head_dim=width, intermediate=8, vocabulary=1)
    zero, one = Matrix(torch.zeros(width, width)), torch.ones(width)
    mlp = Mlp(Matrix(torch.zeros(8, width)), Matrix(torch.zeros(8, width)), Matrix(torch.zeros(width, 8)))
    block = Block(one, zero, zero, zero._replace(bias=row), zero, None, None, None, one, None, None, (mlp,))
    table = Matrix(torch.ones(1, width))
    session = Session(native.NativeRunner(shape, Weights(table, (block,), one, table)), capacity=1, kv_format=kv_format)
    session.read([[0]])
    return session.cache.values[0, 0, 0, 0].view(torch.int8)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("policy", [("skip", "skip"), ("quantize", "quantize"), ("quantize", "untie")])
def test_a_packed_checkpoint_runs_packed_as_the_model_that_it_dequantizes_to(make_decoder, full_logits, tmp_path, bits, symmetric, policy):
    model = make_decoder("qwen2 with a bias")
    format = Format("int", bits, 32, symmetric=symmetric)
    rounded = rtn(model, format, embeddings=policy[0], head=policy[1])
    expected = full_logits(model, TEXT)
    save_packed(model, None, tmp_path, rounded.layers)
    runner = open_runner(tmp_path)
    assert isinstance(runner, native.NativeRunner)
    lanes = {3: "int4 from int3", 4: "int4", 8: "int8"}[bits]
    assert runner.path == f"native {native.levels()[-1]} float32, {lanes}{'' if policy != ('skip', 'skip') else '+float32'} weights"
    found = Session(runner, capacity=40).read([TEXT], keep=40)[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_long_text_gets_rotations_as_it_grows(make_llama, full_logits):
    model = make_llama(layers=1)
    runner = native.NativeRunner(*weights_of(model))
    runner.cache(rows=1, capacity=8)
    text = TEXT * 4
    found = Session(runner, capacity=160).read([text], keep=160)[0]
    assert (found - full_logits(model, text)).abs().max() < 1e-3


def test_torch_keeps_to_one_thread_while_a_runner_with_its_own_decodes(tl8):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for runner, expected in ((native.NativeRunner(*weights_of(tl8)), 1), (TorchRunner(*weights_of(tl8)), 2)):
            forward = runner.forward
            runner.forward = lambda *given, forward=forward: seen.append(torch.get_num_threads()) or forward(*given)
            generate(runner, [TEXT], max_new_tokens=2)
            assert seen.pop() == expected and torch.get_num_threads() == 2
            with pytest.raises(ValueError):
                generate(runner, [[]], max_new_tokens=2)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_two_threads_of_python_do_not_meet_in_one_step(tl8):
    runner = native.NativeRunner(*weights_of(tl8), threads=2)
    expected = Session(runner, capacity=40).read([TEXT], keep=40)[0]
    wrong = []

    def read():
        for _ in range(10):
            if not Session(runner, capacity=40).read([TEXT], keep=40)[0].equal(expected):
                wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_experts_run_in_torch_and_the_path_says_so(make_decoder):
    shape, weights = weights_of(make_decoder("mixtral with a window"))
    with pytest.raises(ValueError, match="experts=4"):
        native.NativeRunner(shape, weights)
    assert runner_of(shape, weights).path == "torch float32"


def test_a_level_that_multiplies_wrong_is_not_used(monkeypatch):
    class Wrong:
        """A library whose products are one too large."""

        def __init__(self, real: ctypes.CDLL):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def assay_multiply(self, level, threads, matrix, x, y, tokens):
            self.real.assay_multiply(level, threads, matrix, x, y, tokens)
            ctypes.c_float.from_address(y.value).value += 1

    native._trusted.cache_clear()
    wrong = Wrong(build.library())
    monkeypatch.setattr(native, "library", lambda: wrong)
    assert native.levels() == ()
    native._trusted.cache_clear()


def test_without_a_compiler_decoding_runs_in_torch_with_a_warning(tl8, monkeypatch, tmp_path):
    def fail(directory):
        raise RuntimeError("no compiler")

    build.library.cache_clear()
    native._trusted.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_built", fail)
        with pytest.warns(UserWarning, match="no native decoder: RuntimeError: no compiler"):
            assert runner_of(*weights_of(tl8)).path == "torch float32"
    build.library.cache_clear()
    native._trusted.cache_clear()
    assert runner_of(*weights_of(tl8)).path.startswith("native")


def test_the_library_is_built_once_and_a_build_that_was_killed_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    source = tmp_path / "one.cpp"  # in the place of the library's own sources, which take half a minute
    source.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "FINGERPRINT_FILES", (str(source),))
    built = tmp_path / "built"
    built.mkdir()
    (built / f"decoder_{build.digest()}.so.lock").write_text("of a process that is gone")
    first = build._built(built)
    stamp = first.stat().st_mtime_ns
    assert build._built(built) == first and first.stat().st_mtime_ns == stamp
    assert sorted(path.suffix for path in built.iterdir()) == [".lock", ".lock", ".so"]
    assert build._built(tmp_path / "elsewhere").is_file()  # also for a second time in one process
