"""What each suite measures, and of which variants. Not here: how a suite is asked for (``protocols.py``)."""

from typing import Literal

# What each suite measures, with the better direction, None where neither is better; budgets and plots name these.
METRICS: dict[str, dict[str, Literal["lower", "higher"] | None]] = {
    "divergence": {
        "kl_mean_nats": "lower",
        "kl_p50_nats": "lower",
        "kl_p90_nats": "lower",
        "kl_p99_nats": "lower",
        "kl_max_nats": "lower",
        "tv_mean": "lower",
        "top1_agreement": "higher",
        "perplexity": "lower",
        "base_perplexity": "lower",
        "perplexity_delta": "lower",
        "self_kl_nats": "lower",
    },
    "bytes": {
        "size_bytes": "lower",
        "weight_bytes": "lower",
        "draft_bytes": "lower",
        "kv_bytes_per_token": "lower",
        "draft_kv_bytes_per_token": "lower",
        "bits_per_weight": "lower",
        "quantized_bits_per_weight": "lower",
        "step_weight_bytes": "lower",
        "block_parameters": "lower",
        "head_parameters": "lower",
        "attention_flops_per_context_token": "lower",
        "draft_step_weight_bytes": "lower",
        "draft_matmul_parameters": "lower",
    },
    "acceptance": {
        "acceptance_rate": "higher",
        "tokens_per_round": "higher",
        "greedy_mismatches": "lower",
        "acceptance_when_reached": "higher",
        "expected_acceptance": "higher",
        "acceptance_minus_expected": None,
    },
    "speed": {"prefill_tok_s": "higher", "decode_tok_s": "higher", "decode_no_draft_tok_s": "higher", "peak_rss_bytes": "lower"},
    "speculation": {
        "measured_speedup": "higher",
        "predicted_speedup": "higher",
        "predicted_speedup_with_verification": "higher",
        "draft_cost_ratio": "lower",
        "verify_cost_ratio": "lower",
        "best_gamma": None,
        "speedup_at_best_gamma": "higher",
        "break_even_batch": "higher",
    },
    "constrained": {
        "constrained_tv": "lower",
        "constrained_kl_nats": "lower",
        "constrained_reverse_kl_nats": "lower",
        "log_legal_mass_nats": "higher",
        "effective_sample_share": "higher",
        "dead_end_share": "lower",
        "unfinished_share": "lower",
        "greedy_agreement": "higher",
        "free_accuracy": "higher",
        "constrained_accuracy": "higher",
        "masked_accuracy": "higher",
        "conditional_accuracy": "higher",
    },
    "distribution": {
        "entropy_mean_nats": None,
        "varentropy_mean_nats2": None,
        "tail_mass": None,
        "kept_tokens": None,
        "kept_tail_mass": None,
        "entropy_law_residual": "lower",
    },
    "arithmetic": {
        "pass_at_1": "higher",
        "pass_at_k": "higher",
        "majority_at_k": "higher",
        "unparsed_share": "lower",
        "truncated_share": "lower",
        "distinct_answers": None,
    },
    "layers": {
        "snr_db": "higher",
        "snr_lowest_db": "higher",
        "clipped_share": None,
        "largest_sigmas": "lower",
        "quantized_bits": "lower",
        "output_error": "lower",
    },
    "outliers": {
        "massive_activations": "lower",
        "largest_activation": "lower",
        "largest_activation_sigmas": "lower",
        "outlier_layers_share": "lower",
        "worst_channel_ratio": "lower",
        "block_cosine": None,
    },
    "heads": {"retrieval_heads": None, "induction_heads": None, "sink_heads": None, "retrieval": None, "induction": None, "sink": None},
    "zeros": {"zero_share": None, "broken_pattern_layers": "lower"},
    "recovery": {
        "student_kl_nats": "lower",
        "student_top1_agreement": "higher",
        "student_log_perplexity": "lower",
        "teacher_log_perplexity": None,
        "regained_share": "higher",
        "training_loss": "lower",
        "domain_weight": None,
    },
    "choice": {"accuracy": "higher", "accuracy_normalised": "higher", "option_mass": "higher"},
    "lm_eval": {"harness_score": None},
    "generation": {
        "task_score": "higher",
        "task_score_strict": "higher",
        "task_pass_at_k": "higher",
        "task_majority_at_k": "higher",
        "task_sample_spread": "lower",
        "task_unparsed_share": "lower",
        "task_truncated_share": "lower",
        "answer_tokens": None,
    },
    "needle": {"needle_accuracy": "higher", "needle_truncated_share": "lower"},
}
TIMED_SUITES = frozenset({"speed", "speculation"})
DRAFT_SUITES = frozenset({"acceptance", "speculation"})  # of variants with a draft alone
# Of what a draft does not change: measured of the variant without one.
UNDRAFTED_SUITES = frozenset(
    {
        "constrained",
        "distribution",
        "arithmetic",
        "layers",
        "outliers",
        "heads",
        "zeros",
        "recovery",
        "choice",
        "lm_eval",
        "generation",
        "needle",
    }
)
PACKED_SUITES = frozenset({"layers"})  # of variants with a quantize step alone
PRUNED_SUITES = frozenset({"zeros"})  # of variants with a prune_weights step alone
TRAINED_SUITES = frozenset({"recovery"})  # of variants whose last weight step trains


def suite_of(metric: str) -> str | None:
    """The suite that measures ``metric``, or None."""
    return next((suite for suite, metrics in METRICS.items() if metric in metrics), None)
