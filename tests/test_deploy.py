"""The deployment files: that Dagster accepts them, that they mean what their comments say, and that they agree with each other and with the lock.

Not here: what the command line does with them. Docker and Kubernetes are not started.
"""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "assets" / "deploy"
INSTANCES = ["local/dagster.yaml", "cluster/dagster.yaml", "cluster/compose.dagster.yaml"]


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def pinned(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return dict(line.split(";")[0].split("==") for line in lines if line and not line.startswith("#"))


def instance_config(name: str, home: Path) -> Any:
    """The file as Dagster reads it from DAGSTER_HOME: validated, with defaults."""
    from dagster._core.instance.config import dagster_instance_config

    (home / "dagster.yaml").write_text((DEPLOY / name).read_text(encoding="utf-8"), encoding="utf-8")
    config, _ = dagster_instance_config(str(home))
    return config


@pytest.mark.parametrize("name", INSTANCES)
def test_dagster_accepts_each_instance_file(name, tmp_path):
    instance_config(name, tmp_path)


def test_dagster_would_refuse_a_misspelt_key(tmp_path):
    """Otherwise the test above could not fail."""
    from dagster._core.errors import DagsterInvalidConfigError
    from dagster._core.instance.config import dagster_instance_config

    text = (DEPLOY / "local/dagster.yaml").read_text(encoding="utf-8").replace("default_limit", "default_limits")
    (tmp_path / "dagster.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DagsterInvalidConfigError, match="default_limits"):
        dagster_instance_config(str(tmp_path))


@pytest.mark.parametrize("name", INSTANCES)
def test_no_instance_phones_home_or_covers_its_first_page(name, tmp_path):
    config = instance_config(name, tmp_path)
    assert config["telemetry"] == {"enabled": False}
    assert config["nux"] == {"enabled": False}


@pytest.mark.parametrize("name", INSTANCES)
def test_a_killed_run_frees_its_pool_slot_and_only_crashed_workers_are_retried(name, tmp_path):
    config = instance_config(name, tmp_path)
    assert config["run_monitoring"]["enabled"]
    assert config["run_monitoring"]["free_slots_after_run_end_seconds"] > 0
    assert config["run_retries"]["enabled"] and config["run_retries"]["max_retries"] >= 1
    assert config["run_retries"]["retry_on_asset_or_op_failure"] is False


def test_the_local_instance_needs_no_service_and_limits_pools_it_was_never_told_of(tmp_path):
    from dagster import DagsterInstance
    from dagster._core.instance.config import PoolGranularity

    (tmp_path / "dagster.yaml").write_text((DEPLOY / "local/dagster.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert type(instance.run_storage).__name__ == "SqliteRunStorage"
        assert type(instance.run_launcher).__name__ == "DefaultRunLauncher"
        assert type(instance.run_coordinator).__name__ == "QueuedRunCoordinator"
        assert not instance.telemetry_enabled and not instance.nux_enabled
        assert instance.run_retries_enabled and instance.run_retries_max_retries == 1
        concurrency = instance.get_concurrency_config()
        assert concurrency.pool_config.pool_granularity is PoolGranularity.OP
        assert concurrency.run_queue_config is not None and concurrency.run_queue_config.max_concurrent_runs == 1

        storage = instance.event_log_storage
        for pool in ("timing", "gpu"):
            storage.initialize_concurrency_limit_to_default(pool)
            first = storage.claim_concurrency_slot(pool, run_id="one", step_key="a")
            second = storage.claim_concurrency_slot(pool, run_id="two", step_key="b")
            assert (first.is_claimed, second.is_claimed) == (True, False)

        storage.set_concurrency_slots("gpu", 2)  # what `dagster instance concurrency set gpu 2` does
        third = storage.claim_concurrency_slot("gpu", run_id="two", step_key="b")
        assert third.is_claimed


@pytest.mark.parametrize("name", ["local/workspace.yaml", "cluster/workspace.yaml"])
def test_each_workspace_is_valid_and_names_the_code_location_alike(name):
    """The history of schedules and of assets hangs on the name of the location."""
    from dagster._core.workspace.config_schema import ensure_workspace_config

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (location,) = ensure_workspace_config(read(name), name)["load_from"]  # type: ignore[index]
    (target,) = location.values()
    assert target["location_name"] == project["tool"]["dagster"]["code_location_name"] == "assay"
    if "module_name" in target:
        assert target["module_name"] == project["tool"]["dagster"]["module_name"]


@pytest.mark.parametrize("name", ["cluster/dagster.yaml", "cluster/compose.dagster.yaml"])
def test_postgres_names_its_driver_and_takes_every_secret_from_the_environment(name):
    """SQLAlchemy 2.1 reads a plain postgresql:// as psycopg 3, which dagster-postgres does not install."""
    database = read(name)["storage"]["postgres"]["postgres_db"]
    assert database["scheme"] == "postgresql+psycopg2"
    assert database["password"] == {"env": "DAGSTER_PG_PASSWORD"}
    assert all(set(database[key]) == {"env"} for key in ("username", "hostname", "db_name"))


@pytest.mark.skipif(not find_spec("dagster_postgres"), reason="dagster-postgres is not installed: it comes with the cluster's images")
@pytest.mark.parametrize("name", ["cluster/dagster.yaml", "cluster/compose.dagster.yaml"])
def test_dagster_postgres_makes_a_psycopg2_url_of_it(name, monkeypatch):
    from dagster._config import process_config
    from dagster._core.storage.config import pg_config
    from dagster_postgres.utils import pg_url_from_config  # pyright: ignore[reportMissingImports]

    for variable in ("USERNAME", "PASSWORD", "HOST", "DB"):
        monkeypatch.setenv(f"DAGSTER_PG_{variable}", variable.lower())
    config = process_config(pg_config(), read(name)["storage"]["postgres"])
    assert config.success, config.errors
    assert pg_url_from_config(config.value) == "postgresql+psycopg2://username:password@host:5432/db"


@pytest.mark.skipif(not find_spec("dagster_k8s"), reason="dagster-k8s is not installed: it comes with the cluster's images")
def test_dagster_k8s_accepts_the_run_launcher(monkeypatch):
    from dagster._config import process_config
    from dagster_k8s import K8sRunLauncher  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("ASSAY_NAMESPACE", "assay")
    result = process_config(K8sRunLauncher.config_type(), read("cluster/dagster.yaml")["run_launcher"]["config"])
    assert result.success, result.errors


def test_compute_logs_lie_on_the_volume_that_every_pod_and_container_mounts():
    from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager

    helm, kubernetes, compose = read("cluster/helm-values.yaml"), read("cluster/dagster.yaml"), read("cluster/docker-compose.yaml")
    managers = [kubernetes["compute_logs"], read("cluster/compose.dagster.yaml")["compute_logs"]]
    managers.append(helm["computeLogManager"]["config"]["customComputeLogManager"])
    for manager in managers:
        assert manager["module"] == LocalComputeLogManager.__module__ and manager["class"] == LocalComputeLogManager.__name__
        assert Path(manager["config"]["base_dir"]).is_relative_to("/assay")
    (mount,) = kubernetes["run_launcher"]["config"]["volume_mounts"]
    assert mount["mountPath"] == "/assay"
    for part in (helm["dagsterWebserver"], *helm["dagster-user-deployments"]["deployments"]):
        assert [mount["mountPath"] for mount in part["volumeMounts"]] == ["/assay"]
        assert [mount["name"] for mount in part["volumeMounts"]] == [volume["name"] for volume in part["volumes"]]
    for service in ("assay-code", "webserver", "daemon"):
        assert "assay:/assay" in compose["services"][service]["volumes"]


def test_the_chart_s_values_say_what_dagster_yaml_says():
    helm, kubernetes = read("cluster/helm-values.yaml"), read("cluster/dagster.yaml")
    assert helm["concurrency"]["enabled"] and helm["telemetry"]["enabled"] is False
    assert helm["concurrency"]["pools"]["granularity"] == kubernetes["concurrency"]["pools"]["granularity"]
    assert helm["concurrency"]["pools"]["defaultLimit"] == kubernetes["concurrency"]["pools"]["default_limit"]
    assert helm["concurrency"]["runs"]["maxConcurrentRuns"] == kubernetes["concurrency"]["runs"]["max_concurrent_runs"]
    monitoring, retries = helm["dagsterDaemon"]["runMonitoring"], helm["dagsterDaemon"]["runRetries"]
    assert {snake(key): value for key, value in monitoring.items()} == kubernetes["run_monitoring"]
    assert {snake(key): value for key, value in retries.items()} == kubernetes["run_retries"]
    assert helm["runLauncher"]["type"] == kubernetes["run_launcher"]["class"]
    assert helm["global"]["postgresqlSecretName"] == kubernetes["run_launcher"]["config"]["postgres_password_secret"]
    assert helm["postgresql"]["postgresqlScheme"] == kubernetes["storage"]["postgres"]["postgres_db"]["scheme"]
    assert [deployment["name"] for deployment in helm["dagster-user-deployments"]["deployments"]] == ["assay"]


def snake(camel: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", camel).lower()


def test_compose_is_reached_from_this_machine_alone_and_finds_its_code_server():
    compose, workspace = read("cluster/docker-compose.yaml"), read("cluster/workspace.yaml")
    server = workspace["load_from"][0]["grpc_server"]
    assert server["host"] in compose["services"]
    image = (DEPLOY / "cluster/cpu.Dockerfile").read_text(encoding="utf-8")
    assert f'"--port", "{server["port"]}"' in image
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_no_file_holds_a_secret():
    """A value named like a secret is a reference to the environment, to a named Secret, or empty."""
    for file in sorted(DEPLOY.rglob("*.yaml")):
        for path, value in leaves(yaml.safe_load(file.read_text(encoding="utf-8"))):
            if re.search(r"(?i)password|token|secret", path[-1]) and not re.search(
                r"(?i)secret_?name$|_secret$|_secrets$|passwordsecret$", path[-1]
            ):
                assert value.startswith("${"), f"{file.name}: {'.'.join(path)} holds {value!r}; name an environment variable instead"


def leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    if isinstance(tree, dict):
        if set(tree) == {"env"}:
            return []
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, str(key)))]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value, path)]
    return [(path, tree)] if isinstance(tree, str) and path else []


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "gpu.Dockerfile"])
def test_an_image_holds_the_whole_package_at_the_locked_versions(name):
    text = (DEPLOY / "cluster" / name).read_text(encoding="utf-8")
    copied = {source for line in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE) for source in line.split()[:-1]}
    assert {"assets", "kernels", "ops", "schemas", "warehouse", "definitions.py", "pyproject.toml", "setup.py"} <= copied
    assert all((ROOT / source).exists() for source in copied - {"kernels"})  # git keeps no empty folder
    assert "pip install --no-cache-dir -c requirements.lock ." in text
    assert "torch==2" not in text, "the version of torch belongs to requirements.lock alone"
    assert re.search(r"^USER assay$", text, flags=re.MULTILINE)


def test_dagster_s_libraries_in_the_images_fit_the_locked_dagster():
    major, minor, patch = pinned(ROOT / "requirements.lock")["dagster"].split(".")
    assert major == "1"
    libraries = pinned(DEPLOY / "cluster/requirements.txt")
    assert set(libraries) == {"dagster-k8s", "dagster-postgres"}
    assert set(libraries.values()) == {f"0.{int(minor) + 16}.{patch}"}
    helm = (DEPLOY / "cluster/helm-values.yaml").read_text(encoding="utf-8")
    assert f"--version {major}.{minor}.{patch} " in helm
