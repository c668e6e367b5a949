"""Run the console on a real terminal with a scripted engine: `python scripted_run.py [answering|stuck|crash]`."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripted_engine import ScriptedEngine, idle_view

from console.app import run_on


class TalkingEngine(ScriptedEngine):
    """Answers every prompt by counting, until it is cancelled or closed."""

    def __init__(self, mode: str) -> None:
        super().__init__(idle_view())
        self._mode = mode

    def start(self) -> None:
        super().start()
        name = "footplate-engine"
        threading.Thread(target=self._talk, name=name, daemon=True).start()

    def _talk(self) -> None:
        number = 0
        while not (self.closed and self._mode != "stuck"):
            time.sleep(0.02)
            for i, request in enumerate(self.requests):
                if request.request_id in self.cancelled:
                    self.cancelled.remove(request.request_id)
                    self.end("cancelled", request=i)
                else:
                    number += 1
                    self.say(f"word{number} \x1b]0;owned\x07", request=i)
            if self._mode == "crash" and number > 5:
                self.publish(kv=0)  # not a view the console can draw


if __name__ == "__main__":
    sys.exit(run_on(TalkingEngine(sys.argv[1] if len(sys.argv) > 1 else "answering")))
