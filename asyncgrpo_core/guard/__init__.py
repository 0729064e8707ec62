"""Run a child so that it, and everything it starts, is gone when its owner is gone, however the owner went.

    owner ── control pipe ──► guard ── PDEATHSIG, subreaper ──► child ──► its children, in any session
      ▲                         │
      └────── status pipe ──────┘          RUN/guards/<name>.json: who is who, for `sweep_stale`

The guard is a small process of its own (`python -m asyncgrpo_core.guard`). Linux only, as vLLM is.

- owner dies (any signal, any way): the guard sees the pipe close or its parent change, ends the child (TERM, grace),
  then every descendant (TERM, KILL), then runs `on_owner_death`.
- child dies: the guard ends what the child left behind and reports the exit code.
- guard dies: the child dies with it at once; what the child left behind is swept by the owner at its next `poll()` or
  `stop()`, or by `sweep_stale` at the next start when the owner went at the same time.
"""

from asyncgrpo_core.guard.owner import GuardedProcess, start_guarded
from asyncgrpo_core.guard.sweep import sweep_stale

__all__ = ["GuardedProcess", "start_guarded", "sweep_stale"]
