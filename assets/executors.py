"""Which executor runs the steps: one name, each engine imported only when it is chosen. Not here: what a step needs (``labels.routing``)."""

import dagster as dg

EXECUTORS = ("in_process", "multiprocess", "k8s", "ray", "celery")
PARALLEL = 2  # steps of ours at once on one machine: more would share its cores and its memory bandwidth


def executor(name: str, *, parallel: int = PARALLEL) -> dg.ExecutorDefinition:
    """The executor called ``name``.

    Raises:
        ValueError: there is no executor of that name, or the package that brings it is not installed.
    """
    try:
        if name == "in_process":
            return dg.in_process_executor
        if name == "multiprocess":  # forkserver imports our definitions once; each step then starts in about a second
            return dg.multiprocess_executor.configured(
                {"max_concurrent": parallel, "start_method": {"forkserver": {"preload_modules": ["assay.definitions"]}}}
            )
        if name == "k8s":
            from dagster_k8s import k8s_job_executor  # pyright: ignore[reportMissingImports]

            return k8s_job_executor
        if name == "ray":
            from dagster_ray import ray_executor  # pyright: ignore[reportMissingImports]

            return ray_executor
        if name == "celery":
            from dagster_celery import celery_executor  # pyright: ignore[reportMissingImports]

            return celery_executor
    except ImportError as error:
        raise ValueError(f"the executor {name!r} needs the package {str(error.name).replace('_', '-')}; pip install it") from error
    raise ValueError(f"no executor is called {name!r}; ASSAY_EXECUTOR is one of {', '.join(EXECUTORS)}")
