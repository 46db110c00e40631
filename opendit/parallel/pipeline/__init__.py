"""Pipeline parallelism: the ranks of the group ``pp`` have different blocks of a model; see docs/parallelism.md.

schedule.py says who computes what when, as data; stages.py leaves a rank its part of a model; links.py sends what goes
from stage to stage; executor.py runs a schedule; forward.py is a model on stages that is called like a whole one. What
a pass computes in training is the runner's (opendit/training/runners/pipeline.py).
"""
