"""`footplate inspect`, `bench` and `pull`: what they write."""

from __future__ import annotations

import argparse
import dataclasses
import json

from console import cli_output
from engine.config import EngineConfig


def report_inspection(options: argparse.Namespace, config: EngineConfig) -> int:
    """Write what the checkpoint `options.inspected` is. The exit code."""
    from engine.inspect import as_json, as_lines, inspect_model
    from engine.weights.locate import locate

    config = dataclasses.replace(config, model=options.inspected)
    with cli_output.ProgressLine() as line:
        path = locate(config.model, progress=line.show)
        inspection = inspect_model(path, config)
    if options.json:
        cli_output.write_line(json.dumps(as_json(inspection)))
    else:
        cli_output.write_line("\n".join(as_lines(inspection)))
    return 0


def report_bench(options: argparse.Namespace, config: EngineConfig) -> int:
    """Measure, and write the report. The exit code."""
    from console.cli_run import loaded_engine
    from engine.bench import Workload, as_lines, measure
    from engine.families.shapes import shape_named

    workload = Workload(options.batch, options.prompt_tokens, options.new_tokens, options.repeats)
    workload.check(config.max_batch)
    if options.shape is not None:
        shape_named(options.shape)
    with loaded_engine(config, shape=options.shape) as engine, cli_output.ProgressLine() as line:
        report = measure(engine, workload, line.show)
    cli_output.write_line(json.dumps(report.as_json()) if options.json else "\n".join(as_lines(report)))
    return 0


def report_pull(options: argparse.Namespace) -> int:
    """Fetch `options.name` and write where it lies. The exit code."""
    from engine.weights.locate import pull

    with cli_output.ProgressLine(bar=True) as line:
        path = pull(options.name, line.show)
    cli_output.write_line(str(path))
    return 0
