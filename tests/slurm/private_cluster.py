"""A private Slurm on this machine: four virtual nodes, accounting, started and stopped by pid.

Nothing under /etc, no systemd, any user. Debian's packages: slurm-wlm munge slurmdbd
slurm-wlm-mysql-plugin mariadb-server-core. The node count, CPUs and GPUs claimed need not exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NEEDS = ("munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "sbatch", "sacct")
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
NUM_NODES = 4
_LIBC = ctypes.CDLL(None)

CONF = """\
ClusterName=private
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired (default 120 s).
AuthInfo=socket={dir}/run/munge.sock,cred_expire={cred_expire_s}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.own
SlurmdPidFile={dir}/run/slurmd.%n.own
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd.%n.log
# No cgroups here: they need a mount that containers do not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
# The least loaded node first, or all small tasks land on n1.
SelectTypeParameters=CR_Core_Memory,CR_LLN
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# The --signal of a job is sent before preemption too.
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=1
# Nodes may claim more CPUs than the machine has.
SlurmdParameters=config_overrides
DefMemPerCPU=100
MaxArraySize=1001
MaxJobCount=10000
MinJobAge=3600
KillWait=2
CompleteWait=0
MessageTimeout={message_timeout_s}
SlurmctldTimeout=10
SlurmdTimeout=10
TCPTimeout=2
UnkillableStepTimeout=20
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={dbd_port}
AccountingStoragePass={dir}/run/munge.sock
AccountingStorageTRES=gres/gpu
GresTypes=gpu
Prolog={dir}/etc/prolog
Include {dir}/etc/numbers.conf
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=5 State=UP PriorityTier=10
PartitionName=low Nodes=ALL MaxTime=INFINITE DefaultTime=5 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
"""

PROLOG = """\
#!/bin/sh
test ! -e {dir}/run/$SLURMD_NODENAME.sick
"""

DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.sock
DbdHost=localhost
DbdPort={dbd_port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
LogFile={dir}/log/slurmdbd.log
PidFile={dir}/run/slurmdbd.own
CommitDelay=1
"""


def missing_programs() -> list[str]:
    return [name for name in NEEDS if not shutil.which(name, path=PATH)]


class PrivateCluster:
    """``up`` and ``down``, and what tests do to a cluster in between."""

    def __init__(self, cred_expire_s: int = 5, message_timeout_s: int = 5) -> None:
        # A short path: unix sockets below it must fit in 108 bytes. In memory where there is room.
        roomy = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**29
        self.dir = Path(tempfile.mkdtemp(prefix="sl", dir="/dev/shm" if roomy else None))
        self.nodes = [f"n{k + 1}" for k in range(NUM_NODES)]
        self.pids: dict[str, int] = {}
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.dir / "etc/slurm.conf"),
                    "MYSQL_UNIX_PORT": str(self.dir / "run/db.sock")}  # fmt: skip
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._port = _free_block(2 + NUM_NODES)
        self._first_job_id = 1
        self._write_conf(cred_expire_s, message_timeout_s)

    def up(self) -> None:
        """Start every daemon, each once the one before answers; raises AssertionError with the logs' end."""
        self.start("munged")
        self.start("mariadbd")
        self._until(lambda: self.ok("munge", "-n", "-S", str(self.dir / "run/munge.sock")), "munged")
        self._until(lambda: (self.dir / "run/db.sock").is_socket(), "mariadbd")
        self.start("slurmdbd")
        self._until(lambda: self.ok("sacctmgr", "-n", "-i", "list", "cluster"), "slurmdbd")
        # A slurmd that cannot register tries again only after about 10 s: the controller comes first.
        self.start("slurmctld")
        self._until(lambda: _listening(self._port), "slurmctld")
        for node in self.nodes:
            self.start(f"slurmd.{node}")
        self._until(self.all_idle)

    def down(self) -> None:
        """Kill all of it, jobs included (a slurmd leaves its jobs behind), and remove the directory."""
        for name in [n for n in self._children if n.startswith("slurmd.")]:
            self.kill(name)
        self._kill_jobs()
        for name in list(self._children):
            self.kill(name)
        shutil.rmtree(self.dir, ignore_errors=True)

    def start(self, daemon: str) -> None:
        """Start one daemon in the foreground mode it has for service managers, so that its pid is known."""
        if daemon == "slurmctld":
            self._new_numbers()
        run, etc = self.dir / "run", self.dir / "etc"
        name, _, node = daemon.partition(".")
        command = {
            "munged": [f"--socket={run}/munge.sock", f"--key-file={etc}/munge.key", f"--seed-file={run}/munge.seed",
                       f"--pid-file={run}/munged.own", f"--log-file={self.dir}/log/munged.log", "--foreground"],
            "mariadbd": ["--no-defaults", *(["--user=root"] if os.getuid() == 0 else []), f"--datadir={self.dir}/db",
                         f"--socket={run}/db.sock", f"--pid-file={run}/mariadbd.own", "--skip-networking",
                         "--skip-grant-tables", "--skip-log-bin", "--innodb-buffer-pool-size=64M",
                         "--innodb-log-file-size=8M", "--innodb-flush-method=nosync", "--innodb-doublewrite=0",
                         "--innodb-flush-log-at-trx-commit=0", "--performance-schema=OFF"],
            "slurmdbd": ["-D", "-s"],
            "slurmctld": ["-D", "-s"],
            "slurmd": ["-D", "-s", "-N", node],
        }[name]  # fmt: skip
        if node:
            (self.dir / "spool" / node).mkdir(exist_ok=True)
        with (self.dir / "log" / f"{daemon}.out").open("ab") as log:
            child = subprocess.Popen([name, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env,
                                     start_new_session=True, preexec_fn=_die_with_parent)  # fmt: skip
        self._children[daemon] = child

    def kill(self, daemon: str) -> None:
        """``kill -9`` of one daemon."""
        child = self._children.pop(daemon, None)
        if child is not None:
            child.kill()
            child.wait()

    def _new_numbers(self) -> None:
        """A killed controller forgets its newest jobs and gives their numbers out again. A node that has just run the
        first job of that number refuses the second ("already running"), and Slurm drains it and holds the job."""
        (self.dir / "etc" / "numbers.conf").write_text(f"FirstJobId={self._first_job_id}\n")
        self._first_job_id += 10_000

    def save_state(self, job: int) -> None:
        """Wait until the controller has written down that it has this job: it does so up to five seconds later."""
        since = time.time()
        self.sh("scontrol", "update", f"jobid={job}", "comment=known")
        self._until(lambda: (self.dir / "state" / "job_state").stat().st_mtime > since)

    def sh(self, *command: str) -> str:
        """Output of a Slurm command; raises AssertionError if it fails."""
        done = self._run(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def ok(self, *command: str) -> bool:
        return self._run(*command).returncode == 0

    def fail_node(self, node: str) -> None:
        """NODE_FAIL at once for what runs there (a dead slurmd takes half a minute)."""
        self.sh("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def make_sick(self, node: str, sick: bool = True) -> None:
        """A node whose prolog fails: Slurm drains it and holds the job that it could not start."""
        mark = self.dir / "run" / f"{node}.sick"
        mark.touch() if sick else mark.unlink(missing_ok=True)

    def heal(self) -> None:
        """Bring back what a test broke, and forget its jobs."""
        for node in self.nodes:
            self.make_sick(node, sick=False)
        for daemon in ("slurmdbd", "slurmctld", *(f"slurmd.{node}" for node in self.nodes)):
            if daemon not in self._children:
                self.start(daemon)
        self._until(lambda: self.ok("scontrol", "ping"))
        self._run("scancel", "--user", str(os.getuid()))
        for row in self.sh("sinfo", "-hN", "-p", "main", "-o", "%N %t").splitlines():
            node, state = row.split()
            if state.startswith(("down", "drain", "drng", "inval")):
                self._run("scontrol", "update", f"nodename={node}", "state=resume")
        self._until(lambda: not self.sh("squeue", "-h", "-o", "%i").split() and self.all_idle(), limit_s=60)

    def all_idle(self) -> bool:
        done = self._run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N")
        return len(set(done.stdout.split())) == len(self.nodes)

    def job_pids(self, containing: str = "slurm_script") -> list[int]:
        """Pids of this cluster's tasks whose command line contains a text."""
        return [pid for pid in self._task_pids() if containing in _read(pid, "cmdline").replace("\0", " ")]

    def step_daemon_pids(self) -> list[int]:
        """Pids of the slurmstepds; they write their title over their environment, so by their open files."""
        return [pid for pid in _pids() if _read(pid, "comm").strip() == "slurmstepd" and self._has_open(pid)]

    def children(self, parent: int) -> list[int]:
        """Pids whose parent it is."""
        return [pid for pid in _pids() if f"\nPPid:\t{parent}\n" in _read(pid, "status")]

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False)

    def _until(self, condition: Callable[[], bool], daemon: str = "", limit_s: float = 30) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            dead = daemon and self._children[daemon].poll() is not None
            logs = "\n".join(p.read_text()[-500:] for p in sorted((self.dir / "log").glob("*.out")))
            assert not dead and time.monotonic() < end, f"{daemon or 'nodes'}: {'died' if dead else 'slow'}: {logs}"
            time.sleep(0.05)

    def _write_conf(self, cred_expire_s: int, message_timeout_s: int) -> None:
        for name in ("etc", "run", "log", "state", "spool", "db", "gpu"):
            (self.dir / name).mkdir(parents=True)
        self.dir.chmod(0o755)
        device = "/dev/tty"
        if os.getuid() == 0:  # a gpu needs a character device with a number at its end
            device = f"{self.dir}/gpu/fake"
            for k in (0, 1):
                os.mknod(f"{device}{k}", 0o20666, os.makedev(1, 3))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={self._port + 2 + k} "
            "CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
            for k, node in enumerate(self.nodes)
        )
        values = {"dir": self.dir, "user": pwd.getpwuid(os.getuid()).pw_name, "port": self._port, "nodes": nodes,
                  "dbd_port": self._port + 1, "cred_expire_s": cred_expire_s,
                  "message_timeout_s": message_timeout_s}  # fmt: skip
        etc = self.dir / "etc"
        (etc / "slurm.conf").write_text(CONF.format(**values))
        self._new_numbers()
        (etc / "prolog").write_text(PROLOG.format(**values))
        (etc / "prolog").chmod(0o755)
        (etc / "gres.conf").write_text(f"NodeName=n[1-{NUM_NODES}] Name=gpu File={device}[0-1]\n")
        for name, content in (("slurmdbd.conf", DBD_CONF.format(**values)), ("munge.key", secrets.token_hex(512))):
            (etc / name).touch(mode=0o600)
            (etc / name).write_text(content)

    def _task_pids(self) -> Iterator[int]:
        for pid in _pids():
            words = _read(pid, "environ").split("\0")
            if f"SLURM_CONF={self.env['SLURM_CONF']}" in words and any(w.startswith("SLURM_JOB_ID=") for w in words):
                yield pid

    def _has_open(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return any(str(self.dir) in str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
        return False

    def _kill_jobs(self) -> None:
        for pid in [*self.step_daemon_pids(), *self._task_pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    """A test run that is killed leaves no daemon behind (Linux: PR_SET_PDEATHSIG)."""
    _LIBC.prctl(1, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _free_block(size: int) -> int:
    start = 17000 + os.getpid() % 100 * 64
    for port in range(start, 32000, 64):
        if not any(_listening(port + k) for k in range(size)):
            return port
    raise AssertionError("no free block of ports")
