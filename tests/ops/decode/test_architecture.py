"""What is read from a config, and what is refused by it."""

import json

import pytest
import torch
import transformers as tf

from assay.ops.decode.architecture import FAMILIES, architecture, require_family
from assay.ops.decode.weights import open_weights


def test_a_gemma_described_by_hand():
    config = tf.Gemma3TextConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96,
        query_pre_attn_scalar=16, sliding_window=7, sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    shape = architecture(config)
    assert [layer.window for layer in shape.layers] == [7, 7, None, 7]
    assert [layer.rope for layer in shape.layers] == [0, 0, 1, 0]
    assert torch.allclose(shape.ropes[0].inverse_frequencies, 1e4 ** -(torch.arange(16) / 16))
    assert torch.allclose(shape.ropes[1].inverse_frequencies, 1e6 ** -(torch.arange(16) / 16) / 8)
    assert (shape.attention_scale, shape.embedding_scale, shape.norm_offset) == (0.25, 8.0, 1.0)
    assert shape.qk_norm and shape.sandwich and shape.tied and shape.activation == "gelu_tanh"
    assert (shape.group, shape.head_dim, shape.experts) == (2, 32, 0)


def test_a_window_belongs_to_the_layers_that_the_config_gives_it():
    def windows(config):
        return [layer.window for layer in architecture(config).layers]

    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert windows(tf.MistralConfig(**sizes, sliding_window=5)) == [5, 5, 5]
    assert windows(tf.MistralConfig(**sizes, sliding_window=None)) == [None] * 3
    assert windows(tf.Qwen2Config(**sizes, use_sliding_window=False, sliding_window=5)) == [None] * 3
    assert windows(tf.Qwen2Config(**sizes, use_sliding_window=True, sliding_window=5, max_window_layers=1)) == [None, 5, 5]


@pytest.mark.parametrize("config", [tf.GPT2Config(n_layer=2), tf.PhiConfig(num_hidden_layers=2), tf.Gemma3Config(), tf.Qwen3MoeConfig()])
def test_another_family_is_refused_by_its_config_alone_and_told_what_works(config, tmp_path):
    config.save_pretrained(tmp_path)  # there is no file of weights, so that reading one would fail otherwise
    with pytest.raises(ValueError, match=f"llama, mistral, .*model_type is '{config.model_type}'"):
        open_weights(tmp_path)
    with pytest.raises(ValueError, match="llama, mistral"):
        architecture(config)


def test_every_family_named_is_one_that_transformers_has():
    for family in FAMILIES:
        require_family({"model_type": family})
        assert family in tf.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    with pytest.raises(ValueError, match="model_type is None"):
        require_family(json.loads("{}"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tf.LlamaConfig(num_hidden_layers=1, hidden_act="relu"), "hidden_act='relu'.*silu, swish, gelu_pytorch_tanh"),
        (tf.LlamaConfig(num_hidden_layers=1, mlp_bias=True), "mlp_bias=True"),
        (tf.Gemma3TextConfig(num_hidden_layers=1, final_logit_softcapping=30.0), "final_logit_softcapping=30"),
        (tf.LlamaConfig(num_hidden_layers=1, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'.*default"),
        (tf.Qwen2Config(num_hidden_layers=1, layer_types=["chunked_attention"]), "type chunked_attention.*full_attention and sliding"),
        (
            tf.LlamaConfig(
                num_hidden_layers=1, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
            ),
            "64 of the 128 channels",
        ),
    ],
)  # fmt: skip
def test_a_switch_that_would_be_ignored_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        architecture(config)
