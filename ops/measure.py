"""Which suite measures a protocol. The suites join protocols to ops, one file each (``ops/suites``), and name what came out.

Imports stand inside the function, so that the code fingerprint of a suite is of what that suite uses. Not here: any arithmetic, or where results go.
"""

from pathlib import Path
from typing import assert_never

from assay.ops.suites.subject import Result, Subject
from assay.schemas.protocols import (
    Acceptance,
    Arithmetic,
    Bytes,
    Choice,
    Constrained,
    Distribution,
    Divergence,
    Generation,
    Heads,
    Layers,
    LmEval,
    Needle,
    Outliers,
    Protocol,
    Recovery,
    Speculation,
    Speed,
    Zeros,
)


def measure(protocol: Protocol, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Apply ``protocol`` to ``subject``.

    Args:
        reference: the directory that :func:`reference` filled for this protocol and base; only ``divergence`` needs it.
        experiment_dir: what a text's relative path is relative to.
    Raises:
        Whatever the suite raises: a suite that fails has no numbers, and the caller says so.
    """
    match protocol:
        case Divergence():
            from assay.ops.suites.divergence import divergence

            return divergence(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Bytes():
            from assay.ops.suites.bytes import bytes

            return bytes(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Acceptance():
            from assay.ops.suites.acceptance import acceptance

            return acceptance(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Speed():
            from assay.ops.suites.speed import speed

            return speed(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Speculation():
            from assay.ops.suites.speculation import speculation

            return speculation(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Constrained():
            from assay.ops.suites.constrained import constrained

            return constrained(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Distribution():
            from assay.ops.suites.distribution import distribution

            return distribution(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Arithmetic():
            from assay.ops.suites.arithmetic import arithmetic

            return arithmetic(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Layers():
            from assay.ops.suites.layers import layers

            return layers(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Outliers():
            from assay.ops.suites.outliers import outliers

            return outliers(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Heads():
            from assay.ops.suites.heads import heads

            return heads(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Zeros():
            from assay.ops.suites.zeros import zeros

            return zeros(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Recovery():
            from assay.ops.suites.recovery import recovery

            return recovery(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Choice():
            from assay.ops.suites.choice import choice

            return choice(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case LmEval():
            from assay.ops.suites.lm_eval import lm_eval

            return lm_eval(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Generation():
            from assay.ops.suites.generation import generation

            return generation(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Needle():
            from assay.ops.suites.needle import needle

            return needle(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case _:
            assert_never(protocol)
