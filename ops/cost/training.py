"""The arithmetic of training and of distillation, in FLOPs. Not here: training (``ops/train``), or what it regains."""

FORWARD, TRAIN = 2, 6  # FLOPs a weight and token: a forward; a forward and a backward


def training_flops(parameters: float, tokens: float) -> float:
    """6 · N · D.

    Source:
        Kaplan et al. 2020, §2.1, arXiv:2001.08361.
    """
    return TRAIN * parameters * tokens


def teacher_share(teacher: float, student: float) -> float:
    """A teacher's forward over the student's forward and backward: 2 N_t / (6 N_s) = N_t / (3 N_s). 15B → 8B: 0.6; 70B → 8B: 2.9.

    Raises:
        ValueError: a size is not above 0.
    """
    if min(teacher, student) <= 0:
        raise ValueError(f"teacher={teacher}, student={student} weights; expected numbers above 0")
    return FORWARD * teacher / (TRAIN * student)


def distillation_flops(teacher: float, student: float, tokens: float) -> float:
    """The student's training and the teacher's forward over the same tokens; a forward less where the teacher's words are kept from before."""
    return training_flops(student, tokens) * (1 + teacher_share(teacher, student))


def device_hours(flops: float, *, rate: float, utilisation: float = 0.4) -> float:
    """Hours of one device of ``rate`` FLOP/s that keeps ``utilisation`` of it up, 0 to 1."""
    if not (rate > 0 and 0 < utilisation <= 1):
        raise ValueError(f"rate={rate}, utilisation={utilisation}; expected a rate above 0 and a share between 0 and 1")
    return flops / (rate * utilisation) / 3600
