# Aerie: a target language model in, a served and measured EAGLE-3 drafter out.
#
#   prompts -> conversations -> tokens -> hidden -> drafter -> arms -> report      (container: one SGLang image)
#
# Table of contents: the configuration, the chunks, the stages in the order of the data, the targets.
import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.0")
sys.path.insert(0, str(Path(workflow.basedir, "scripts")))
from aerie import config as settings
from aerie import warm


configfile: "config.yaml"


try:
    settings.validate(config)
except settings.ConfigError as error:
    raise WorkflowError(str(error))
os.environ.update(settings.job_environment(config))
if workflow.is_main_process:  # jobs inherit it, those that parse this file again too
    os.environ[warm.WORKFLOW] = warm.process_name(os.getpid())

RESULTS = config["results_dir"]
LOGS = f"{RESULTS}/logs"
BENCHMARKS = f"{RESULTS}/benchmarks"
SIF = f"{RESULTS}/container/sglang.sif"
CHUNKS = settings.chunk_ids(config)
ARMS = settings.arm_names(config)
SERVER = settings.server_flags(config)
WARM = f"{RESULTS}/runs/warm"
GPUS = settings.gpus(config)


wildcard_constraints:
    chunk=r"\d+",
    arm="|".join(ARMS),
    format="|".join(settings.EXPORT_FINAL),


# A server that outlives its job needs a container that does: this process on the host runs it.
onstart:
    if config["server"]["warm_idle_s"]:
        options = shlex.split(workflow.deployment_settings.apptainer_args)
        warm.start_starter(Path(WARM), ["apptainer", "exec", "--home", os.getcwd(), *options])


localrules:
    all,
    verify,
    write_manifest,


include: "rules/container.smk"
include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/conversations.smk"
include: "rules/tokens.smk"
include: "rules/hidden.smk"
include: "rules/drafter.smk"
include: "rules/arms.smk"
include: "rules/report.smk"


# Every artifact is named, not the last ones alone: Snakemake does not miss a removed file that nothing asks for.
rule all:
    default_target: True
    input:
        [
            expand([str(file) for file in rule.output], chunk=CHUNKS, arm=ARMS)
            for rule in (
                rules.build_image,
                rules.fetch_target,
                rules.write_prompts,
                rules.generate_conversations,
                rules.tokenize_conversations,
                rules.capture_hidden,
                rules.build_vocab,
                rules.train_drafter,
                rules.export_drafter,
                rules.check_export,
                rules.run_arm,
                rules.check_acceptance,
                rules.write_report,
                rules.write_manifest,
            )
        ],
