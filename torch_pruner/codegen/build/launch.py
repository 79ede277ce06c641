"""Emits how a library launches its threads: on those of an OpenMP, or else on TVM's.

TVM's code calls a launch and a barrier by two pointers that every library has, which are TVM's own
functions when it has been loaded. The entry ``LAUNCH`` puts the two of this module in their place
and takes the address of a table (``team.py``), which is read at every launch. Eager's operators
run on the threads of torch's OpenMP; kernels that run on them as well leave no second pool whose
threads look for work on the cores of the first.

A launch asks OpenMP for a team; each of its threads runs one task. Tasks wait for one another at
barriers, so there have to be as many threads as tasks. TVM's pool has the launch where that is not
known beforehand (the table says zero; a calling thread whose loops have another number of threads;
inside a parallel loop), and where the team turns out to be smaller.

Threads that slept may be woken on the core of the thread that woke them. There both look for work
in turns of a scheduler's tick, 4 ms, while another core is idle. So the calling thread gives its
core away once if others do not come, and again while it waits for them to leave, and one that finds
itself on the caller's core moves to any other that it may use.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import tvm_ffi

from torch_pruner import exc
from torch_pruner.codegen.build.link import make_room
from torch_pruner.codegen.build.waiting import pause_of
from torch_pruner.codegen.tir.builders import tvm
from torch_pruner.graph.memory import LAUNCH

if TYPE_CHECKING:
    from torch_pruner.target import TargetSpec

MAX_TASKS = 256  # of one launch: each has a line of counters on the caller's stack
_PAUSES = 1 << 12  # of a thread that waits at a barrier, before it lets others have its core
_SOON = 1 << 8  # of one that waits for others to come or to leave: these have nothing else to do

# The fields of the table are numbered: those of ``team.OpenMP`` from 0 to 4, TVM's launch, threads.
# %launch: the loop and its argument, %env, whether a task failed, whether threads are too few, the
# caller's core, threads that have come and that have left beside it.
# %env is TVM's TVMParallelGroupEnv; its counters lie sixteen numbers apart, as TVM's own do. The
# two pointers are defined weakly, as TVM does: a library whose kernels never wait has no other.
_CODE = """
%env = type { ptr, i32 }
%launch = type { ptr, ptr, %env, i32, i32, i32, i32, i32 }

@__TVMBackendParallelLaunch = weak global ptr null
@__TVMBackendParallelBarrier = weak global ptr null
@table = internal global ptr null

declare i32 @sched_yield()
declare void @TVMFFIErrorSetRaisedFromCStr(ptr, ptr)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
DECLARED

@kind = internal constant [13 x i8] c"RuntimeError\\00"
@failed = internal constant [34 x i8] c"a task of a kernel returned error\\00"

define internal ptr @field(i64 %number) {
  %fields = load ptr, ptr @table
  %place = getelementptr i64, ptr %fields, i64 %number
  %value = load ptr, ptr %place
  ret ptr %value
}

MOVE
define internal void @wait_for(ptr %counter, i32 %number, i32 %most) noinline {
entry:
  br label %look
look:
  %looks = phi i32 [ 0, %entry ], [ %again, %short ], [ %looks, %patient ], [ %last, %once ]
  %seen = load atomic i32, ptr %counter acquire, align 4
  %some = icmp slt i32 %seen, %number
  br i1 %some, label %late, label %done
late:
  %long = icmp sge i32 %looks, SOON
  br i1 %long, label %give, label %short
short:
  %again = add i32 %looks, 1
  PAUSE
  br label %look
give:
  %ignored = call i32 @sched_yield()
  %forever = icmp eq i32 %most, 0
  br i1 %forever, label %patient, label %once
patient:
  br label %look
once:
  %last = add i32 %looks, 1
  %tired = icmp sge i32 %last, %most
  br i1 %tired, label %done, label %look
done:
  ret void
}

define internal void @task(ptr %of) {
  %count_of = call ptr @field(i64 2)
  %count = call i32 %count_of()
  %wanted_at = getelementptr %launch, ptr %of, i32 0, i32 2, i32 1
  %wanted = load i32, ptr %wanted_at
  %whole = icmp eq i32 %count, %wanted
  br i1 %whole, label %run, label %short
short:
  %short_at = getelementptr %launch, ptr %of, i32 0, i32 4
  store atomic i32 1, ptr %short_at monotonic, align 4
  ret void
run:
  %number_of = call ptr @field(i64 1)
  %number = call i32 %number_of()
  %come_at = getelementptr %launch, ptr %of, i32 0, i32 6
  %left_at = getelementptr %launch, ptr %of, i32 0, i32 7
  %others = sub i32 %wanted, 1
  %caller = icmp eq i32 %number, 0
  br i1 %caller, label %greet, label %come
greet:
  %most = add i32 SOON, 1
  call void @wait_for(ptr %come_at, i32 %others, i32 %most)
  br label %work
come:
  %come_before = atomicrmw add ptr %come_at, i32 1 release
  %there_at = getelementptr %launch, ptr %of, i32 0, i32 5
  %there = load i32, ptr %there_at
  %here = HERE
  %together = icmp eq i32 %here, %there
  br i1 %together, label %move, label %work
move:
  call void @move(i32 %here)
  br label %work
work:
  %function = load ptr, ptr %of
  %given_at = getelementptr %launch, ptr %of, i32 0, i32 1
  %given = load ptr, ptr %given_at
  %env_at = getelementptr %launch, ptr %of, i32 0, i32 2
  %status = call i32 %function(i32 %number, ptr %env_at, ptr %given)
  %good = icmp eq i32 %status, 0
  br i1 %good, label %done, label %bad
bad:
  %bad_at = getelementptr %launch, ptr %of, i32 0, i32 3
  store atomic i32 1, ptr %bad_at monotonic, align 4
  br label %done
done:
  br i1 %caller, label %part, label %leave
part:
  call void @wait_for(ptr %left_at, i32 %others, i32 0)
  ret void
leave:
  %left_before = atomicrmw add ptr %left_at, i32 1 release
  ret void
}

define internal i32 @launch(ptr %function, ptr %given, i32 %asked) {
  %fields = load ptr, ptr @table
  %threads_at = getelementptr i64, ptr %fields, i64 6
  %threads = load atomic i64, ptr %threads_at monotonic, align 8
  %threads32 = trunc i64 %threads to i32
  %all = icmp eq i32 %asked, 0
  %count = select i1 %all, i32 %threads32, i32 %asked
  %may = icmp ne i32 %threads32, 0
  %many = icmp sgt i32 %count, 1
  %few = icmp sle i32 %count, MAX_TASKS
  %several = and i1 %many, %few
  %possible = and i1 %may, %several
  br i1 %possible, label %ask, label %other
ask:
  %most_of = call ptr @field(i64 3)
  %most = call i32 %most_of()
  %same = icmp eq i32 %most, %count
  br i1 %same, label %outer, label %other
outer:
  %inside_of = call ptr @field(i64 4)
  %inside = call i32 %inside_of()
  %outermost = icmp eq i32 %inside, 0
  br i1 %outermost, label %team, label %other
team:
  %of = alloca %launch, align 64
  %numbers = mul i32 %count, 16
  %counters = alloca i32, i32 %numbers, align 64
  %count64 = zext i32 %count to i64
  %bytes = mul i64 %count64, 64
  call void @llvm.memset.p0.i64(ptr align 64 %counters, i8 0, i64 %bytes, i1 false)
  store ptr %function, ptr %of
  %given_at = getelementptr %launch, ptr %of, i32 0, i32 1
  store ptr %given, ptr %given_at
  %counters_at = getelementptr %launch, ptr %of, i32 0, i32 2, i32 0
  store ptr %counters, ptr %counters_at
  %wanted_at = getelementptr %launch, ptr %of, i32 0, i32 2, i32 1
  store i32 %count, ptr %wanted_at
  %bad_at = getelementptr %launch, ptr %of, i32 0, i32 3
  store i32 0, ptr %bad_at
  %short_at = getelementptr %launch, ptr %of, i32 0, i32 4
  store i32 0, ptr %short_at
  %there_at = getelementptr %launch, ptr %of, i32 0, i32 5
  %there = HERE
  store i32 %there, ptr %there_at
  %come_at = getelementptr %launch, ptr %of, i32 0, i32 6
  store i32 0, ptr %come_at
  %left_at = getelementptr %launch, ptr %of, i32 0, i32 7
  store i32 0, ptr %left_at
  %parallel = call ptr @field(i64 0)
  call void %parallel(ptr @task, ptr %of, i32 %count, i32 0)
  %short = load atomic i32, ptr %short_at monotonic, align 4
  %complete = icmp eq i32 %short, 0
  br i1 %complete, label %ran, label %other
ran:
  %bad = load atomic i32, ptr %bad_at monotonic, align 4
  %good = icmp eq i32 %bad, 0
  br i1 %good, label %done, label %raise
done:
  ret i32 0
raise:
  call void @TVMFFIErrorSetRaisedFromCStr(ptr @kind, ptr @failed)
  ret i32 -1
other:
  %tvm = call ptr @field(i64 5)
  %status = call i32 %tvm(ptr %function, ptr %given, i32 %asked)
  ret i32 %status
}

define internal i32 @barrier(i32 %number, ptr %env) {
entry:
  %counters = load ptr, ptr %env
  %count_at = getelementptr %env, ptr %env, i32 0, i32 1
  %count = load i32, ptr %count_at
  %own = mul i32 %number, 16
  %own_at = getelementptr i32, ptr %counters, i32 %own
  %before = atomicrmw add ptr %own_at, i32 1 release
  br label %each
each:
  %k = phi i32 [ 0, %entry ], [ %next, %met ]
  %more = icmp slt i32 %k, %count
  br i1 %more, label %other, label %done
other:
  %self = icmp eq i32 %k, %number
  %theirs = mul i32 %k, 16
  %theirs_at = getelementptr i32, ptr %counters, i32 %theirs
  br i1 %self, label %met, label %look
look:
  %looks = phi i32 [ 0, %other ], [ %looks, %give ], [ %again, %wait ]
  %seen = load atomic i32, ptr %theirs_at monotonic, align 4
  %behind = icmp sle i32 %seen, %before
  br i1 %behind, label %late, label %met
late:
  %again = add i32 %looks, 1
  %long = icmp sgt i32 %again, PAUSES
  br i1 %long, label %give, label %wait
give:
  %ignored = call i32 @sched_yield()
  br label %look
wait:
  PAUSE
  br label %look
met:
  %next = add i32 %k, 1
  br label %each
done:
  fence acquire
  ret i32 0
}

define dllexport i32 @__tvm_ffi_LAUNCH(ptr %self, ptr %given, i32 %count, ptr %result) {
  %value_at = getelementptr i8, ptr %given, i64 8
  %address = load ptr, ptr %value_at
  store ptr %address, ptr @table
  store ptr @launch, ptr @__TVMBackendParallelLaunch
  store ptr @barrier, ptr @__TVMBackendParallelBarrier
  ret i32 0
}

!llvm.module.flags = !{!0}
!0 = !{i32 4, !"tvm_target", !"TARGET"}
"""


# To another core, and free to be anywhere again.
_MOVE = """
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)

define internal void @move(i32 %core) noinline cold {
entry:
  %mine = alloca [16 x i64], align 8
  %without = alloca [16 x i64], align 8
  %known = icmp ult i32 %core, 1024
  br i1 %known, label %ask, label %stay
ask:
  call void @llvm.memset.p0.i64(ptr align 8 %mine, i8 0, i64 128, i1 false)
  %asked = call i32 @sched_getaffinity(i32 0, i64 128, ptr %mine)
  %told = icmp sge i32 %asked, 0
  br i1 %told, label %begin, label %stay
begin:
  %core64 = zext i32 %core to i64
  %word = lshr i64 %core64, 6
  %bit_at = and i64 %core64, 63
  %bit = shl i64 1, %bit_at
  %others = xor i64 %bit, -1
  br label %each
each:
  %k = phi i64 [ 0, %begin ], [ %next, %each ]
  %any = phi i64 [ 0, %begin ], [ %more, %each ]
  %from = getelementptr i64, ptr %mine, i64 %k
  %cores = load i64, ptr %from
  %is_word = icmp eq i64 %k, %word
  %kept = select i1 %is_word, i64 %others, i64 -1
  %free = and i64 %cores, %kept
  %to = getelementptr i64, ptr %without, i64 %k
  store i64 %free, ptr %to
  %more = or i64 %any, %free
  %next = add i64 %k, 1
  %again = icmp ult i64 %next, 16
  br i1 %again, label %each, label %decide
decide:
  %elsewhere = icmp ne i64 %more, 0
  br i1 %elsewhere, label %go, label %stay
go:
  %went = call i32 @sched_setaffinity(i32 0, i64 128, ptr %without)
  %freed = call i32 @sched_setaffinity(i32 0, i64 128, ptr %mine)
  ret void
stay:
  ret void
}
"""
_STAY = """
define internal void @move(i32 %core) {
  ret void
}
"""


def launch_code(target: TargetSpec) -> str:
    """The module, in LLVM's language, for one target."""
    written = str(tvm.target.Target(target.tvm_target()))
    escaped = written.replace("\\", "\\5C").replace('"', "\\22")
    pause, declared = pause_of(target)
    code = _CODE.replace("DECLARED", declared)
    moves = "linux" in str(dict(target.attrs).get("mtriple", sys.platform))
    code = code.replace("MOVE", _MOVE if moves else _STAY)
    code = code.replace("HERE", "call i32 @sched_getcpu()" if moves else "add i32 0, 0")
    code = code.replace("PAUSES", str(_PAUSES)).replace("PAUSE", pause).replace("SOON", str(_SOON))
    code = code.replace("MAX_TASKS", str(MAX_TASKS)).replace("LAUNCH(", f"{LAUNCH}(")
    return code.replace("TARGET", escaped)


def write_launch(target: TargetSpec, path: Path) -> None:
    """Write the object file of the entry ``LAUNCH``. Raises ``CompileError``, ``OSError``."""
    load = tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")
    with tempfile.TemporaryDirectory(prefix="torch_pruner") as folder:
        text = Path(folder) / "launch.ll"
        text.write_text(launch_code(target), encoding="ascii")
        try:
            module = load(str(text), "ll")
        except (tvm.error.InternalError, RuntimeError, ValueError) as err:
            problem = "TVM refused the code of the launch"
            raise exc.CompileError("kernels", problem, log=str(err)) from err
    make_room(path)
    module.write_to_file(str(path), "o")
