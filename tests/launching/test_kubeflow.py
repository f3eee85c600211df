"""The manifests for Kubeflow, as text and against the fields that its definitions have. No cluster takes part."""

import sys

import pytest
import yaml

from parwrap.launching.jobs import requested_job
from parwrap.launching.kubeflow import manifest
from parwrap.run import main

GPUS = {"limits": {"nvidia.com/gpu": int}}
ENVIRONMENT = [{"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}]
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": ENVIRONMENT,
    "resources": GPUS,
    "volumeMounts": [{"name": str, "mountPath": str}],
}
REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {"spec": {"containers": [CONTAINER], "volumes": [{"name": str, "emptyDir": {"medium": str}}]}},
}
METADATA = {"name": str, "namespace": str}
FIELDS = {
    # the part that is used of manifests/base/crds/kubeflow.org_pytorchjobs.yaml in github.com/kubeflow/training-operator
    "PyTorchJob": {
        "apiVersion": {"kubeflow.org/v1"},
        "kind": {"PyTorchJob"},
        "metadata": METADATA,
        "spec": {
            "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}},
            "nprocPerNode": str,
            "elasticPolicy": {"rdzvBackend": {"c10d", "etcd", "etcd-v2"}, "minReplicas": int, "maxReplicas": int, "maxRestarts": int},
            "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
        },
    },
    # and of manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml in github.com/kubeflow/trainer
    "TrainJob": {
        "apiVersion": {"trainer.kubeflow.org/v1alpha1"},
        "kind": {"TrainJob"},
        "metadata": METADATA,
        "spec": {
            "runtimeRef": {"name": str},
            "trainer": {
                "image": str,
                "command": [str],
                "args": [str],
                "env": ENVIRONMENT,
                "numNodes": int,
                "numProcPerNode": int,
                "resourcesPerNode": GPUS,
            },
        },
    },
}


def assert_fits(value, form, where=""):
    if isinstance(form, dict):
        assert value.keys() <= form.keys(), where
        for name in value:
            assert_fits(value[name], form[name], f"{where}.{name}")
    elif isinstance(form, list):
        for each in value:
            assert_fits(each, form[0], where)
    elif isinstance(form, set):
        assert value in form, where
    else:
        assert type(value) is form, where


def written(*argv):
    return manifest(requested_job(["--launcher", "kubeflow", "--image", "me/train:1", *argv], {}, cores=8))


def test_pytorchjob(capsys, monkeypatch):
    monkeypatch.setenv("PARWRAP_SECRET", "s3cret")
    options = ["--image", "me/train:1", "--nodes", "3", "--gpus-per-node", "8", "--namespace", "ml", "--seed", "1"]

    assert 0 == main(["--launcher", "kubeflow", *options, "--print", "work/Train_it.py", "--lr", "0.1", "two words", "$(HOME)", "yes"])
    printed = capsys.readouterr().out
    pods = """\
      restartPolicy: Never
      template:
        spec:
          containers:
          - name: pytorch
            image: me/train:1
            command:
            - python
            - -m
            - parwrap.run
            args:
            - --nproc-per-node
            - '8'
            - --seed
            - '1'
            - work/Train_it.py
            - --lr
            - '0.1'
            - two words
            - $$(HOME)
            - 'yes'
            env:
            - name: PARWRAP_SECRET
              valueFrom:
                secretKeyRef:
                  name: train-it
                  key: PARWRAP_SECRET
            resources:
              limits:
                nvidia.com/gpu: 8
            volumeMounts:
            - name: shm
              mountPath: /dev/shm
          volumes:
          - name: shm
            emptyDir:
              medium: Memory
"""
    assert (
        f"""\
apiVersion: v1
kind: Secret
metadata:
  name: train-it
  namespace: ml
stringData:
  PARWRAP_SECRET: s3cret
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: train-it
  namespace: ml
spec:
  runPolicy:
    cleanPodPolicy: Running
  nprocPerNode: '8'
  pytorchReplicaSpecs:
    Master:
      replicas: 1
{pods}    Worker:
      replicas: 2
{pods}"""
        == printed
    )
    assert_fits(list(yaml.safe_load_all(printed))[1], FIELDS["PyTorchJob"])


def test_trainjob(capsys):
    options = ["--image", "me/train:1", "--gpus-per-node", "8", "--kind", "trainjob", "--name", "tune", "--runtime", "mine"]

    assert 0 == main(["--launcher", "kubeflow", *options, "--dry-run", "-m", "pkg.train"])
    printed = capsys.readouterr().out
    assert (
        """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: tune
spec:
  runtimeRef:
    name: mine
  trainer:
    image: me/train:1
    command:
    - python
    - -m
    - parwrap.run
    args:
    - --nproc-per-node
    - '8'
    - -m
    - pkg.train
    numNodes: 1
    numProcPerNode: 8
    resourcesPerNode:
      limits:
        nvidia.com/gpu: 8
"""
        == printed
    )
    assert_fits(yaml.safe_load(printed), FIELDS["TrainJob"])


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_nodes_get_a_new_secret_for_each_job(kind, capsys, monkeypatch):
    monkeypatch.delenv("PARWRAP_SECRET", raising=False)
    argv = ["--launcher", "kubeflow", "--image", "i", "--kind", kind, "--name", "tune", "--nodes", "2", "--print", "train.py"]
    secrets = set()
    for _ in range(2):
        assert 0 == main(argv)
        secret, job = yaml.safe_load_all(capsys.readouterr().out)
        secrets.add(secret["stringData"]["PARWRAP_SECRET"])
        assert_fits(job, FIELDS[job["kind"]])
        assert "'secretKeyRef': {'name': 'tune', 'key': 'PARWRAP_SECRET'}" in str(job)

    assert [32, 32] == [len(text) for text in secrets]


def test_pods_that_start_again_together_are_all_workers():
    printed = written("--nodes", "2", "--nproc-per-node", "4", "--max-restarts", "3", "train.py")

    assert {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 2, "maxRestarts": 3} == printed["spec"]["elasticPolicy"]
    assert ["Worker"] == list(printed["spec"]["pytorchReplicaSpecs"])
    assert "OnFailure" == printed["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"]
    assert_fits(printed, FIELDS["PyTorchJob"])


def test_a_pod_without_gpus_has_one_rank_unless_told():
    """The operators' own default is as many as a machine has cores."""
    printed = written("train.py")

    assert ["Master"] == list(printed["spec"]["pytorchReplicaSpecs"])
    assert "1" == printed["spec"]["nprocPerNode"]
    assert ["--nproc-per-node", "1", "train.py"] == printed["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0][
        "args"
    ]
    assert 1 == written("--kind=trainjob", "train.py")["spec"]["trainer"]["numProcPerNode"]
    assert_fits(printed, FIELDS["PyTorchJob"])


def test_arguments_that_kubernetes_would_take_for_numbers_are_quoted(capsys):
    """It reads YAML with gopkg.in/yaml.v2, whose resolve.go takes more for numbers and truth values than PyYAML does."""
    numbers = ["1e-3", "1e3", "+1e3", "-1e-5", ".5e3", "08", "0o17", "0X1F", "1_0e3", "-0b1", "y", "N", "off", "~", "-.inf", "2026-01-02"]
    assert 0 == main(["--launcher", "kubeflow", "--image", "i", "--print", "train.py", *numbers, "-m", "./1e3", "e3"])
    printed = capsys.readouterr().out

    words = [line.partition("- ")[2] for line in printed.partition("- train.py\n")[2].partition("volumeMounts")[0].splitlines()][:-1]
    assert [f"'{number}'" for number in numbers] + ["-m", "./1e3", "e3"] == words


def test_arguments_keep_every_line_break(capsys):
    given = ["a\x85b", "a\u2028b", "\u2029", "a\nb", "a\r\nb"]
    assert 0 == main(["--launcher", "kubeflow", "--image", "i", "--print", "train.py", *given])
    (container,) = yaml.safe_load(capsys.readouterr().out)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]

    assert given == container["args"][-5:]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("a/b/My_Train.v2.py", "my-train-v2"),
        ("-m pkg.train", "pkg-train"),
        ("2nd_try.py", "nd-try"),
        (f"{'x' * 70}.py", "x" * 46),
        (f"{'x' * 45}_y.py", "x" * 45),
    ],
)
def test_the_name_is_the_scripts(script, name):
    assert name == written(*script.split())["metadata"]["name"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--image", "i", "train.py"],
            "--launcher kubeflow writes a manifest and submits nothing: add --print, and pipe the output into `kubectl apply -f -`.",
        ),
        (["--print", "train.py"], "--launcher kubeflow needs --image, a container image that contains parwrap and the script."),
        (
            ["--print", "--image", "i", "--name", "My_job", "train.py"],
            "--name My_job is not a valid job name on Kubernetes: use up to 46 lowercase letters, digits and '-', starting with a letter.",
        ),
        (
            ["--print", "--image", "i", "\u8bad\u7ec3.py"],
            "the script's name, \u8bad\u7ec3.py, cannot be turned into a job name on Kubernetes: add --name.",
        ),
        (
            ["--print", "--image", "i", "--runtime", "mine", "train.py"],
            "--runtime mine needs --kind trainjob: add it, or remove --runtime.",
        ),
        (
            ["--print", "--image", "i", "--kind", "trainjob", "--max-restarts", "1", "train.py"],
            "--max-restarts has no effect with --kind trainjob, whose nodes cannot restart together: remove it, or choose --kind "
            "pytorchjob.",
        ),
        (
            ["--print", "--image", "i", "--kind", "trainjob", "--nproc-per-node", "auto", "train.py"],
            "--nproc-per-node auto is not a number, which --kind trainjob needs: set the number of ranks on each node.",
        ),
    ],
)
def test_what_cannot_be_written(argv, text, capsys):
    assert 2 == main(["--launcher", "kubeflow", *argv])
    assert f"parwrap run: {text}\n" == capsys.readouterr().err


def test_without_pyyaml(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "yaml", None)

    assert 2 == main(["--launcher", "kubeflow", "--image", "i", "--print", "train.py"])
    assert (
        "parwrap run: --launcher kubeflow writes YAML with PyYAML, which is not installed: pip install PyYAML, or install "
        "parwrap[kubeflow].\n" == capsys.readouterr().err
    )
