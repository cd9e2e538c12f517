"""The hostile programs: one table for the tests, the bench script and docs/sandbox.md.

Each tries something and says `refused` when it couldn't, or ESCAPED. None of them knows the answer that would pass.
"""

# ruff: noqa: E501, UP031
# fmt: off
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from upswing.verify.sandbox.jail import seccomp

X86 = os.uname().machine == "x86_64"
_COLUMN = 0 if X86 else 1
_JUMP_TO_ITSELF = b"\xeb\xfe" if X86 else b"\x00\x00\x00\x14"
NUMBERS = {name: row[_COLUMN] for name, row in seccomp._DENIED.items() if row[_COLUMN] is not None}

PROLOGUE = """
import ctypes, errno, mmap, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
N = {numbers!r}
FILE, FOLDER, PID, TCP, UDP, UNIX, ABSTRACT = {canary!r}
def call(name, *args):
    "a libc function, or a system call by its number; OSError when it fails"
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    done = getattr(libc, name)(*args) if name not in N else libc.syscall(ctypes.c_long(N[name]), *args)
    if done == -1:
        raise OSError(ctypes.get_errno(), name)
    return done
def tries(*attempts):
    "every attempt must fail"
    for i, attempt in enumerate(attempts):
        try:
            got = attempt()
        except (OSError, ImportError, RuntimeError, MemoryError, ValueError):
            continue
        print("ESCAPED", i, repr(got)[:200])
        return
    print("refused")
def read(path):
    with open(path, "rb") as file:
        return file.read(1 << 20)
def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)
held_areas = []
def machine_code(code):
    area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    area.write(code); held_areas.append(area)
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
"""


@dataclass(frozen=True)
class Hostile:
    """`ends`: how it may end: `refused` (it said so), `exit N`, `signal N`, or the limit that killed it."""

    name: str
    kind: str
    tries: str
    ends: tuple[str, ...]
    code: str
    limits: dict[str, Any] = field(default_factory=dict)


PROGRAMS: list[Hostile] = []


def add(kind: str, name: str, tries: str, ends: str, code: str, **limits: Any) -> None:
    PROGRAMS.append(Hostile(name, kind, tries, tuple(ends.split(" or ")), code, limits))


def describe(returncode: int | None, killed: str | None, stdout: bytes) -> Sequence[str]:
    """Every name that this end has in `Hostile.ends`."""
    if returncode is None:
        return [str(killed)]
    names = [f"exit {returncode}" if returncode >= 0 else f"signal {-returncode}"]
    return [*names, "refused"] if returncode == 0 and stdout.strip() == b"refused" else names


def table() -> str:
    """As in docs/sandbox.md."""
    cells = [[one.kind, one.name, one.tries, " or ".join(one.ends)] for one in PROGRAMS]
    rows = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| kind | program | what it tries | how it ends |", "|---|---|---|---|", *rows])


# -- processes and threads
K = "processes"
add(K, "fork bomb", "forks for ever", "wall", "while True:\n    try: os.fork()\n    except OSError: pass", wall_s=0.7)
add(K, "shell fork bomb", "`:(){ :|:& };:`", "wall or exit 0 or exit 1 or exit 2 or exit 254 or output",
    "os.execvp('bash', ['bash', '-c', ':(){ :|:& };:; wait'])", wall_s=0.7)
add(K, "thread bomb", "starts threads without end", "refused", """
def more():
    for n in range(10**6):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        assert n < 40
tries(more)
sys.stdout.flush(); os._exit(0)""")
add(K, "comet", "forks and leaves, again and again, to outrun the killer", "exit 0", """
if not os.fork():
    while True:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
time.sleep(0.1)""")
add(K, "daemon", "double fork with setsid; would write later", "exit 0", """
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    time.sleep(1); write('/tmp/late'); print('late', flush=True); time.sleep(60); os._exit(0)
time.sleep(0.05)""")
add(K, "daemon that ignores signals", "the same, deaf to all that can be ignored", "exit 0", """
if not os.fork():
    os.setsid()
    for one in range(1, 65):
        try: signal.signal(one, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(1)
time.sleep(0.05)""")
add(K, "child that holds stdout", "leaves a sleeper with the pipes open and ends", "exit 0",
    "subprocess.Popen(['sleep', '60']); print('done')")
add(K, "zombies", "leaves children that nobody waits for", "exit 0", """
for _ in range(20):
    if not os.fork(): os._exit(0)
time.sleep(0.05)""")
add(K, "exec chain", "replaces itself for ever", "wall", """
write('again', '#!/bin/sh\\nexec sh ./again\\n')
os.execvp('sh', ['sh', './again'])""", wall_s=0.5)
# -- signals
K = "signals"
add(K, "kill everyone", "kill(-1, SIGKILL)", "refused or signal 9", """
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
print('refused')""")
add(K, "kill process 1", "SIGKILL and SIGSTOP to the supervisor", "refused", """
for one in (signal.SIGKILL, signal.SIGSTOP): os.kill(1, one)
time.sleep(0.05); print('refused')""")
add(K, "all signals to process 1", "every signal, many times", "refused", """
for _ in range(50):
    for one in range(1, 65):
        try: os.kill(1, one)
        except OSError: pass
print('refused')""")
add(K, "kill the parent", "SIGKILL to its parent and its group", "refused", """
os.kill(os.getppid(), signal.SIGKILL); tries(lambda: os.kill(PID, 9), lambda: os.killpg(PID, 9))""")
add(K, "deaf loop", "ignores every signal and spins", "wall", """
for one in range(1, 65):
    try: signal.signal(one, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""", wall_s=0.5)
add(K, "blocked signals", "blocks every signal and sleeps", "wall",
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(100)", wall_s=0.4)
add(K, "stops itself", "SIGSTOP to itself", "wall", "os.kill(os.getpid(), signal.SIGSTOP)", wall_s=0.4)
add(K, "stops its group", "SIGSTOP to all it can reach", "wall",
    "os.fork(); os.killpg(0, signal.SIGSTOP)", wall_s=0.4)
add(K, "signal queue flood", "queues real-time signals until memory is gone", "refused", """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
def flood():
    for n in range(10**6):
        if libc.sigqueue(os.getpid(), 40, None): raise OSError
tries(flood)""")
add(K, "aborts", "SIGABRT, to have the host's crash handler look", "signal 6", "os.abort()")
add(K, "crashes", "reads address 0", "signal 11", "ctypes.string_at(0)")
# -- other processes
K = "other processes"
add(K, "ptrace", "attaches to process 1", "refused", "tries(lambda: call('ptrace', 16, 1, 0, 0), lambda: call('ptrace', 0x4206, 1, 0, 0))")
add(K, "process_vm_readv", "reads the supervisor's memory", "refused",
    "b = (ctypes.c_long * 2)(0, 0); tries(lambda: call('process_vm_readv', 1, b, 1, b, 1, 0))")
add(K, "pidfd_getfd", "takes the supervisor's socket", "refused", "fd = os.pidfd_open(1); tries(lambda: call('pidfd_getfd', fd, 0, 0))")
add(K, "/proc/1", "memory, environment, files, root of the supervisor", "refused",
    "tries(*[lambda p=p: read('/proc/1/' + p) for p in ('mem', 'environ', 'fd/0', 'maps', 'stat', 'cmdline')],"
    " lambda: os.listdir('/proc/1/root/'), lambda: os.listdir('/proc/1/cwd/'))")
add(K, "limits of process 1", "prlimit, priority, scheduling of the supervisor", "refused", """
import resource
tries(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)), lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
      lambda: os.setpriority(os.PRIO_USER, 0, 19), lambda: os.sched_setaffinity(1, {0}),
      lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))""")
add(K, "kill a host process", "signals to the PIDs of the host", "refused", "tries(*[lambda s=s: os.kill(PID, s) for s in (0, 9, 19)])")
add(K, "sees no other process", "looks for others in /proc", "refused",
    "print('refused' if [p for p in os.listdir('/proc') if p.isdigit()] == [str(os.getpid())] else os.listdir('/proc'))")
add(K, "raises its own limits", "setrlimit above what it was given", "refused", """
import resource
tries(*[lambda k=k: resource.setrlimit(k, (resource.RLIM_INFINITY,) * 2) for k in
        (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)])""")
# -- /proc, /dev, /sys
K = "/proc, /dev, /sys"
add(K, "switches in /proc", "core_pattern, sysrq, kcore, kallsyms, modprobe", "refused",
    "tries(*[lambda p=p: read(p) for p in ('/proc/sys/kernel/core_pattern', '/proc/kcore', '/proc/kallsyms', '/proc/keys')],"
    " lambda: write('/proc/sysrq-trigger'), lambda: write('/proc/sys/kernel/modprobe'), lambda: os.listdir('/proc/sys'))")
add(K, "its own /proc entries", "oom score, user map, memory of its executable", "refused",
    "tries(lambda: write('/proc/self/oom_score_adj', '-1000'), lambda: write('/proc/self/uid_map', '0 0 1'),"
    " lambda: open('/proc/self/exe', 'r+b'), lambda: open('/proc/self/mem', 'r+b'))")
add(K, "/proc/self/root and cwd", "to the host by the magic links", "refused",
    "tries(*[lambda p=p: read(p + FILE) for p in ('/proc/self/root', '/proc/self/cwd/../../..', '/proc/self/task/../root',"
    " '/proc/thread-self/root/..')])")
add(K, "/proc/self/fd", "looks for descriptors that it inherited", "refused", """
held = sorted(int(one) for one in os.listdir('/proc/self/fd'))
print('refused' if held[:3] == [0, 1, 2] and len(held) == 4 else held)
kinds = {os.readlink(f'/proc/self/fd/{fd}').partition(':')[0] for fd in (0, 1, 2)}
assert kinds == {'pipe'}, kinds""")
add(K, "descriptors by number", "writes to 3 … 1023", "refused", "tries(*[lambda n=n: os.write(n, b'x') for n in range(3, 1024)])")
add(K, "memory devices", "/dev/mem, /dev/kmem, /dev/port, /dev/kmsg", "refused",
    "tries(*[lambda p=p: read('/dev/' + p) for p in ('mem', 'kmem', 'port', 'kmsg')])")
add(K, "disks and terminals", "/dev/vda, sda, loop0, tty, ptmx, fuse, kvm, vsock", "refused",
    "tries(*[lambda p=p: os.open('/dev/' + p, os.O_RDWR) for p in"
    " ('vda', 'sda', 'nvme0n1', 'loop0', 'tty', 'ptmx', 'fuse', 'kvm', 'vsock', 'net/tun', 'nvidia0')])")
add(K, "makes a device", "mknod of a disk and of /dev/mem", "refused",
    "import stat\ntries(lambda: os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(8, 0)), lambda: os.mknod('m', 0o600 | stat.S_IFCHR, os.makedev(1, 1)))")
add(K, "/sys and cgroups", "lists and writes", "refused",
    "tries(lambda: os.listdir('/sys/kernel'), lambda: os.listdir('/sys/fs/cgroup'), lambda: write('/sys/fs/cgroup/cgroup.procs', '0'))")
add(K, "writes to devices", "replaces /dev/null, fills /dev/full", "refused",
    "tries(lambda: os.remove('/dev/null'), lambda: write('/dev/x'), lambda: write('/dev/full'), lambda: os.rename('/dev/null', '/dev/y'))")
# -- files
K = "files"
add(K, "the canary file", "reads and writes a file of the host by its path", "refused", "tries(lambda: read(FILE), lambda: write(FILE), lambda: os.listdir(FOLDER))")
add(K, "symbolic links", "a link to it, a link to its folder, a chain", "refused", """
os.symlink(FILE, 'a'); os.symlink(FOLDER, 'b'); os.symlink('a', 'c'); os.symlink('/proc/self/root' + FILE, 'd')
tries(*[lambda p=p: read(p) for p in 'acd'], lambda: os.listdir('b'))""")
add(K, "hard links", "to the canary and to the system's files", "refused",
    "tries(lambda: os.link(FILE, 'x'), lambda: os.link('/etc/passwd', 'y'), lambda: os.link('/usr/bin/env', 'z'))")
add(K, "dot dot", "many .. from everywhere", "refused",
    "tries(*[lambda p=p: read(p + '/..' * 40 + FILE) for p in ('.', '/tmp', '/proc/self', '/dev', '/usr/bin', '/dev/fd')])")
add(K, "secrets of the system", "shadow, ssh, the homes, the run folder", "refused",
    "tries(*[lambda p=p: os.path.exists(p) and p or read('/none') for p in ('/etc/shadow', '/etc/ssh', '/root/.ssh', '/root/.bashrc',"
    " '/var', '/run', '/boot', '/etc/hostname', '/etc/resolv.conf', '/etc/environment')])")
add(K, "poisons the library", "writes into Python's own files, for the next program", "refused",
    "tries(lambda: write(os.__file__), lambda: write(os.path.dirname(os.__file__) + '/sitecustomize.py'), lambda: write('/usr/lib/x'),"
    " lambda: os.remove('/usr/bin/env'), lambda: os.chmod('/usr/bin/env', 0o777), lambda: write('/etc/passwd'), lambda: write('/x'))")
add(K, "poisons imports", "sitecustomize.py, json.py, conftest.py, .pth and a shell start file", "exit 0", """
for name in ('sitecustomize.py', 'usercustomize.py', 'json.py', 'os.py', 'conftest.py', 'x.pth', '.bashrc', '.profile'):
    for folder in ('.', '/tmp', '/dev/shm'): write(folder + '/' + name, 'import os; os._exit(0)')""")
add(K, "removes everything", "rm -rf of the system, of /proc and of its own place", "exit 0", """
import shutil
for folder in ('/usr/bin', '/etc', '/dev', '/proc', '/sandbox'): shutil.rmtree(folder, ignore_errors=True)
os.stat('/usr/bin/env'), os.stat('/etc/passwd'), os.stat('/dev/null')""")
add(K, "project packages", "imports what Upswing is made of", "refused",
    "tries(*[lambda m=m: __import__(m) for m in ('upswing', 'torch', 'transformers', 'numpy', 'pydantic', 'jail')])")
add(K, "disk fill", "writes until the disk is full, in both places", "refused", """
def fill(folder):
    for n in range(100):
        with open(f'{folder}/{n}', 'wb', buffering=0) as file: assert file.write(bytes(1 << 20)) or True
tries(lambda: fill('.'), lambda: fill('/tmp'), lambda: fill('/dev/shm'))""", disk_mb=16)
add(K, "inode fill", "makes empty files until none is left", "refused",
    "tries(lambda: [os.close(os.open(str(n), os.O_CREAT)) for n in range(10**6)])", disk_mb=8)
add(K, "huge sparse file", "truncates to 1 TB, and maps it", "refused", """
def grow():
    with open('big', 'wb') as file:
        file.truncate(1 << 40)
tries(grow, lambda: mmap.mmap(-1, 1 << 40))""")
add(K, "deep folders", "nests folders beyond the longest path", "exit 0", "for _ in range(1500):\n    os.mkdir('d' * 9); os.chdir('d' * 9)")
add(K, "FIFO", "opens a pipe that nobody writes to", "wall", "os.mkfifo('f'); open('f')", wall_s=0.4)
add(K, "unreadable names", "names with line breaks, control characters and bytes that are no text", "exit 0",
    "for name in (b'\\n', b'\\xff\\xfe', b'\\x1b[2J', b'a\\nb', b' '): open(name, 'w').close()")
# -- privileges
K = "privileges"
add(K, "becomes root", "setuid, setgid, setgroups, capabilities", "refused",
    "tries(lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0), lambda: os.setuid(65534))")
add(K, "capabilities", "asks for them, and looks what it has", "refused", """
caps = {line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')}
print('refused' if caps == {'0' * 16} else caps)
assert libc.prctl(47, 2, 12, 0, 0) == -1""")
add(K, "set-user-ID programs", "su, sudo, mount, passwd, newuidmap", "refused", """
def use(*argv):
    if subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode: raise OSError
tries(lambda: use('su', '-c', 'id'), lambda: use('sudo', '-n', 'id'), lambda: use('mount', '-t', 'tmpfs', 'x', '/tmp'),
      lambda: use('newuidmap', str(os.getpid()), '0', '0', '1'), lambda: use('unshare', '-r', 'id'))""")
add(K, "set-user-ID file", "makes a program of its own belong to root", "refused", """
write('x', '#!/bin/sh\\nid -u\\n'); os.chmod('x', 0o6755)
assert subprocess.run(['./x'], capture_output=True).stdout == b'1000\\n'
tries(lambda: os.chown('x', 0, 0), lambda: os.chown('x', 65534, 65534))""")
add(K, "mount", "tmpfs, bind, proc, overlay, remount", "refused", """
def mount(source, kind, flags): call('mount', source, b'/tmp', kind, flags, 0)
tries(lambda: mount(b'x', b'tmpfs', 0), lambda: mount(b'/usr', None, 4096), lambda: mount(b'proc', b'proc', 0),
      lambda: mount(b'overlay', b'overlay', 0), lambda: mount(None, None, 32), lambda: call('open_tree', -100, b'/', 1),
      lambda: call('fsopen', b'tmpfs', 0), lambda: call('move_mount', -100, b'/usr', -100, b'/tmp', 0))""")
add(K, "unmount", "uncovers what lies below", "refused",
    "tries(*[lambda p=p: call('umount2', p, 2) for p in (b'/', b'/proc', b'/sandbox', b'/usr', b'/usr/local', b'/dev/null')])")
add(K, "chroot", "the classic way out: chroot, then ..", "refused",
    "os.mkdir('r'); tries(lambda: os.chroot('r'), lambda: call('pivot_root', b'r', b'r'))")
add(K, "new namespaces", "unshare and clone into namespaces where it would be root", "refused", """
tries(*[lambda f=1 << b: call('unshare', f) for b in (17, 25, 26, 27, 28, 29, 30)],
      lambda: call('syscall', %d, 0x10000011, 0, 0, 0, 0), lambda: call('syscall', 435, 0, 88))""" % seccomp._CLONE[_COLUMN])
add(K, "other namespaces", "setns into those of process 1 and its own", "refused",
    "tries(lambda: open('/proc/1/ns/mnt'), lambda: call('setns', os.open('/proc/self/ns/user', 0), 0), lambda: call('setns', os.pidfd_open(1), 1 << 17))")
add(K, "file handles", "open_by_handle_at, past the root", "refused",
    "tries(lambda: call('open_by_handle_at', -100, ctypes.create_string_buffer(64), 0), lambda: call('name_to_handle_at', -100, b'/', 0, 0, 0))")
# -- the kernel
K = "kernel"
for number, args in {"keyctl": "0, -3, 1", "add_key": "b'user', b'x', b'y', 1, -3", "bpf": "0, 0, 0", "userfaultfd": "1",
                     "io_uring_setup": "8, ctypes.create_string_buffer(256)", "perf_event_open": "ctypes.create_string_buffer(128), 0, -1, -1, 0",
                     "fanotify_init": "0, 0", "personality": "0x0040000", "memfd_secret": "0"}.items():
    add(K, number, f"the system call `{number}`", "refused", f"tries(lambda: call({number!r}, {args}))")
add(K, "every denied system call", "all of the filter's list, by number, with zeros", "refused", """
for name in N:
    ctypes.set_errno(0)
    assert libc.syscall(ctypes.c_long(N[name]), *[ctypes.c_long(0)] * 6) == -1 and ctypes.get_errno() == errno.EPERM, name
print('refused')""")
add(K, "clocks and names", "sets the time and the host's name", "refused",
    "tries(lambda: time.clock_settime(0, 0), lambda: socket.sethostname('x'), lambda: call('adjtimex', ctypes.create_string_buffer(b'\\x01' * 8, 256)))")
add(K, "memory outside of processes", "memfd, System V and POSIX queues", "refused",
    "tries(lambda: os.memfd_create('x'), lambda: call('shmget', 0, 1 << 30, 0o1600), lambda: call('msgget', 0, 0o1600),"
    " lambda: call('semget', 0, 1000, 0o1600), lambda: call('mq_open', b'/q', 0o102, 0o600, 0))")
if X86:
    add(K, "x32 system calls", "the same calls under other numbers", "signal 31", "libc.syscall(ctypes.c_long(0x40000000 | 39))")
    add(K, "32-bit system calls", "int 0x80, where numbers mean something else", "signal 31 or signal 11",
        "machine_code(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')()")
# -- network
K = "network"
add(K, "TCP", "to a server on the host, by every address", "refused",
    "tries(*[lambda h=h: socket.create_connection((h, TCP), 1) for h in ('127.0.0.1', 'localhost', '::1', '0.0.0.0', '169.254.169.254', '1.1.1.1')])")
add(K, "UDP", "a datagram to the host", "refused",
    "tries(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP)))")
add(K, "unix socket", "to a server on the host, by its path", "refused",
    "tries(lambda: socket.socket(socket.AF_UNIX).connect(UNIX), lambda: socket.socket(socket.AF_UNIX).connect('/run/docker.sock'))")
add(K, "abstract socket", "to a server on the host, by a name without a file", "refused",
    "tries(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT), lambda: socket.socket(socket.AF_UNIX).connect('\\0/org/freedesktop/systemd1/notify'))")
add(K, "other families", "raw, packet, netlink, vsock, bluetooth, crypto", "refused",
    "tries(*[lambda f=f, k=k: socket.socket(f, k) for f, k in ((2, 3), (17, 3), (16, 3), (40, 1), (31, 3), (38, 5), (10, 3), (44, 3))])")
add(K, "listens", "opens a server for somebody outside", "refused", "tries(lambda: socket.create_server(('0.0.0.0', 0)), lambda: socket.create_server(('::', 0), family=socket.AF_INET6))")
add(K, "DNS and HTTP", "looks up a name, fetches a page, bash's /dev/tcp", "refused", """
import urllib.request
def bash():
    if subprocess.run(['bash', '-c', f'exec 3<>/dev/tcp/127.0.0.1/{TCP}'], capture_output=True).returncode: raise OSError
tries(lambda: socket.getaddrinfo('example.org', 80), lambda: urllib.request.urlopen(f'http://127.0.0.1:{TCP}', timeout=1), bash)""")
# -- memory
K = "memory"
add(K, "memory bomb", "a list that grows for ever", "exit 1 or memory", "a = []\nwhile True: a.append(bytearray(1 << 22))", memory_mb=128)
add(K, "one huge block", "a list of 10**10", "exit 1", "a = [0] * 10**10")
add(K, "memory of many", "20 processes with 40 MB each", "memory", """
for _ in range(20):
    if not os.fork():
        a = b'x' * (40 << 20); time.sleep(10)
time.sleep(10)""", memory_mb=192, wall_s=3.0)
add(K, "shared memory", "maps shared pages in many processes", "memory or exit 1", """
held = []
for _ in range(4):
    area = mmap.mmap(-1, 64 << 20); area.write(bytes(64 << 20)); held.append(area)
time.sleep(10)""", memory_mb=128, wall_s=3.0)
add(K, "/dev/shm", "fills it", "refused", "tries(lambda: [open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20)) for n in range(100)])", disk_mb=16)
add(K, "locked memory", "mlockall", "refused", "tries(lambda: call('mlockall', 3), lambda: [call('mlock', ctypes.addressof(b), 8192) for b in [ctypes.create_string_buffer(8192)]])")
add(K, "deep recursion", "recursion without a limit", "signal 11 or exit 1 or memory or wall", "sys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()", memory_mb=128, wall_s=0.7)
add(K, "zip bomb", "unpacks much from little", "exit 1 or memory", """
import zlib
c = zlib.compressobj(1); packed = b''.join(c.compress(bytes(1 << 20)) for _ in range(80)) + c.flush()
a = zlib.decompress(packed)""", memory_mb=64)
add(K, "nested source", "a program that takes the compiler apart", "exit 1 or signal 11", "compile('(' * 10**5 + ')' * 10**5, 'x', 'exec')")
add(K, "descriptors", "opens files, pipes and sockets until none is left", "refused", """
held = []
tries(lambda: [held.append(open('/dev/null')) for _ in range(10**5)], lambda: [held.append(os.pipe()) for _ in range(10**5)],
      lambda: [held.extend(socket.socketpair()) for _ in range(10**5)])""")
add(K, "full pipes and sockets", "leaves data in the kernel's buffers", "exit 0", """
for _ in range(60):
    a, b = socket.socketpair(); a.setblocking(False); a.detach(), b.detach()
    r, w = os.pipe(); os.set_blocking(w, False); os.write(w, bytes(1 << 16))""")
# -- time
K = "time"
add(K, "sleeps", "for an hour", "wall", "time.sleep(3600)", wall_s=0.4)
add(K, "spins", "an endless loop", "wall", "while True: pass", wall_s=0.4)
add(K, "spins in C", "an endless loop without the interpreter", "wall",
    f"machine_code({_JUMP_TO_ITSELF!r})()", wall_s=0.4)
add(K, "burns CPU", "past its CPU time, well within the wall's", "cpu", "while True: pass", cpu_s=0.2, wall_s=10.0)
add(K, "burns CPU, deaf to SIGXCPU", "the same, with the signal ignored", "cpu",
    "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", cpu_s=0.2, wall_s=10.0)
add(K, "burns CPU in many", "spreads it over processes that come and go", "cpu", """
while True:
    if not os.fork():
        end = time.monotonic() + 0.05
        while time.monotonic() < end: pass
        os._exit(0)
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]: break
        except ChildProcessError: break
    time.sleep(0.02)""", cpu_s=0.4, wall_s=10.0)
add(K, "burns CPU uncounted", "the same in children whose end it ignores, so that the kernel doesn't add their time", "cpu", """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if not os.fork():
        end = time.monotonic() + 0.1
        while time.monotonic() < end: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass""", cpu_s=0.4, wall_s=10.0)
add(K, "catastrophic regex", "backtracks for ever", "wall or cpu", "import re; re.match('(a+)+$', 'a' * 60 + 'b')", wall_s=0.4)
add(K, "huge power", "computes 10**10**9", "wall or exit 1 or memory", "print(len(str(7 ** 10**9)))", wall_s=0.4)
add(K, "timer storm", "a signal every microsecond", "wall", """
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
while True: pass""", wall_s=0.4)
add(K, "waits for input", "reads stdin for ever", "exit 0", "while sys.stdin.read(1) or time.sleep(0): pass")
# -- output
K = "output"
add(K, "stdout flood", "prints for ever", "output", "while True: print('x' * 1000)", output_bytes=100_000)
add(K, "stderr flood", "the same to stderr", "output", "while True: os.write(2, b'x' * 1000)", output_bytes=100_000)
add(K, "mixed flood", "four processes to both", "output",
    "os.fork(), os.fork()\nwhile True:\n    for fd in (1, 2): os.write(fd, b'x' * 1000)", output_bytes=100_000)
add(K, "one endless line", "without a line break", "output", "os.write(1, b'x' * (1 << 26))", output_bytes=100_000)
add(K, "flood from behind", "a child floods after its parent has left", "exit 0 or output", """
if not os.fork():
    while True: os.write(1, b'x' * 1000)
time.sleep(0.01)""", output_bytes=100_000)
add(K, "closes its output", "closes all and spins", "wall", "for fd in (0, 1, 2): os.close(fd)\nwhile True: pass", wall_s=0.4)
add(K, "forged messages", "prints what the supervisor would send", "exit 0", """
text = b'{"returncode": 0, "killed": null, "duration_s": 0.0, "sizes": [2, 0]}'
os.write(1, len(text).to_bytes(4, 'big') + text + b'42')""")
add(K, "control characters", "terminal escapes, zero bytes, what is no text", "exit 0", "os.write(1, bytes(range(256)) * 10)")
# -- passing without solving
K = "forgery"
add(K, "leaves with 0", "os._exit(0) before anything is checked", "exit 0", "os._exit(0)")
add(K, "sys.exit with 0", "and a finalizer", "exit 0", "import atexit; atexit.register(os._exit, 0); sys.exit(5)")
add(K, "prints success", "what a test runner prints", "exit 0", "print('1 passed in 0.01s'); print('OK'); print('True')")
add(K, "pickle", "prints a pickle that runs a command in whoever loads it", "exit 0", """
import pickle
class Evil:
    def __reduce__(self): return os.system, (f'echo gone > {FILE}',)
os.write(1, pickle.dumps(Evil()))""")
add(K, "equal to everything", "objects whose == says yes, patched builtins", "exit 0", """
import builtins
class Yes:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __str__(self): return '42'
builtins.print = lambda *a, **k: None; builtins.open = None; builtins.__import__ = None; builtins.str = Yes; sys.modules.clear()""")
add(K, "patches the checker", "json, subprocess, unittest and the hooks of the interpreter", "exit 0", """
import json, unittest
json.dumps = json.loads = lambda *a, **k: True
unittest.TestCase.assertEqual = lambda *a, **k: None
sys.excepthook = sys.displayhook = lambda *a: None
sys.settrace(lambda *a: None); raise SystemExit(0)""")
add(K, "the caller's frames", "walks frames and all objects for the secret", "refused", """
import gc
want, found, frame = 'CANA' + 'RY-', [], sys._getframe()
def secret(value): return isinstance(value, str) and want in value and value != want
while frame:
    found += [v for d in (frame.f_globals, frame.f_locals) for v in list(d.values()) if secret(v)]
    frame = frame.f_back
found += [o for o in gc.get_objects() for v in (o.values() if type(o) is dict else o if type(o) in (list, tuple) else ())
          if secret(v)]
print('refused' if not found else found)""")
add(K, "its own memory", "searches every page for the secret", "refused", """
want, found = ('CANA' + 'RY-').encode(), 0
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
    for line in maps.read().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split('-'))
        if ' r' in line and end - start < 1 << 26 and '[v' not in line:
            try: memory.seek(start); text = memory.read(end - start)
            except OSError: continue
            at = text.find(want)
            while at >= 0:
                found += text[at + 7:at + 15].isalnum()
                at = text.find(want, at + 1)
            del text
print('refused' if not found else found)""")
add(K, "environment", "looks for secrets in every environment it can see", "refused", """
text = repr(os.environ) + ''.join(read(f'/proc/{p}/environ').decode() for p in os.listdir('/proc') if p.isdigit())
print('refused' if 'CANA' + 'RY-' not in text and 'TOKEN' not in text and 'HOME=/root' not in text else text)""")
add(K, "arguments", "looks for secrets in command lines", "refused",
    "text = b''.join(read(f'/proc/{p}/cmdline') for p in os.listdir('/proc') if p.isdigit())\nprint('refused' if (b'CANA' + b'RY-') not in text else text)")
add(K, "answers in files", "searches all it can write or was given for tests and answers", "refused", """
found = [os.path.join(f, n) for r in ('/sandbox', '/tmp', '/dev/shm', '/etc') for f, _, ns in os.walk(r) for n in ns if 'alternatives' not in f]
print('refused' if set(found) <= {'/etc/passwd', '/etc/group', '/etc/hosts', '/etc/nsswitch.conf', '/etc/ld.so.cache'} else found)""")
