"""Train a site's clients: orders come in from a server, updates go out.

`node.Node` requests orders and drives everything; open it first. `session` and `reporter` talk to the server, `job_queue` decides what
may start, `executor` and `worker_processes` train by a `learner.Learner` (`trainer_learner` is the one with a Trainer, through
`round_callback` and `local_policy`), `client_store` keeps what a restart needs, `secure_sum_client` masks updates. `client.Client` is what a
user makes.
"""

from arclight.federated.clients.learner import Learner as Learner
from arclight.federated.clients.learner import Outcome as Outcome
