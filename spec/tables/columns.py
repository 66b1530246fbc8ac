"""What every standard column means: the words of the column tables."""

from __future__ import annotations

# Column of a sample: meaning with unit; codes of the rules on its values. Structural rules
# (RF-I001 to RF-I005) hold for every column and are not repeated.
SAMPLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "sample_id": ("name of the sample, its own within a dataset; the key of idempotent writes",
                  ("RF-I006",)),
    "group_id": ("samples of one prompt share it", ()),
    "rollout_id": ("conversation of which the sample is a branch", ()),
    "branch_index": ("number of the branch within its rollout", ("RF-I023",)),
    "policy_version": ("oldest sampler version of the sample", ()),
    "temperature": ("sampling temperature; 0 is greedy", ("RF-I022",)),
    "reward": ("scalar reward", ("RF-I022",)),
    "advantage": ("scalar advantage; `advantages` replaces it", ("RF-I022",)),
    "finish_reason": ("why generation ended, in the engine's word", ()),
    "teacher_id": ("teacher of the `teacher_…` columns", ()),
    "env_name": ("environment or task", ()),
    "metrics": ("JSON object of further numbers", ("RF-I021",)),
    "provenance": ("JSON object: engine, its version, sampling settings", ("RF-I021",)),
    "token_offset": ("tokens cut off before the first one", ("RF-I023",)),
    "input_ids": ("token ids: context, tool output, completion", ("RF-I007",)),
    "completion_mask": ("1: the token is scored, which makes it a target", ("RF-I008", "RF-I009")),
    "loss_weights": ("weight of the loss term; absent: 1", ("RF-I017",)),
    "rollout_log_probs": ("the sampler's log-prob of the target's token, nats",
                          ("RF-I017", "RF-I018", "RF-I020")),
    "old_log_probs": ("the trainer's recomputed log-prob, nats", ("RF-I017", "RF-I018")),
    "ref_log_probs": ("the reference model's log-prob, nats", ("RF-I017", "RF-I018")),
    "advantages": ("advantage per target", ("RF-I017",)),
    "policy_versions": ("sampler version per target", ()),
    "target_flags": ("bits, see below", ("RF-I010", "RF-I020")),
    "candidate_counts": ("size of the candidate set; 0: the whole vocabulary, or missing by flag",
                         ("RF-I013", "RF-I020")),
    "candidate_ids": ("token ids of the set, ascending", ("RF-I011", "RF-I012", "RF-I013")),
    "candidate_log_probs": ("the sampler's log-prob of each, nats",
                            ("RF-I017", "RF-I018", "RF-I019")),
    "topk_counts": ("size of the sampler's head; 0: none", ("RF-I020",)),
    "topk_ids": ("token ids of the head", ("RF-I014", "RF-I015")),
    "topk_log_probs": ("log-prob of each, nats, not increasing",
                       ("RF-I016", "RF-I017", "RF-I018", "RF-I019")),
    "teacher_topk_counts": ("size of the teacher's head; 0: none", ("RF-I020",)),
    "teacher_topk_ids": ("token ids of the head", ("RF-I014", "RF-I015")),
    "teacher_topk_log_probs": ("the teacher's log-prob of each, nats, not increasing",
                               ("RF-I016", "RF-I017", "RF-I018", "RF-I019")),
    "teacher_log_probs": ("the teacher's log-prob of the target's token, nats",
                          ("RF-I017", "RF-I018", "RF-I020")),
    "topk_weights": ("weights of a head of random draws", ("RF-I017", "RF-I024")),
    "teacher_topk_weights": ("weights of a teacher's head of random draws",
                             ("RF-I017", "RF-I024")),
}  # fmt: skip

# Columns that only packed records have. The others are those of samples: target columns and all
# counted axes as they are, record columns as `member_<name>`.
PACKED: dict[str, tuple[str, tuple[str, ...]]] = {
    "input_ids": ("token ids in depth-first order, shared prefixes once", ("RF-I007",)),
    "position_ids": ("number of ancestors of the token: its position in every member it is of",
                     ("RF-I033",)),
    "node_lengths": ("tokens of the node", ("RF-I030", "RF-I031")),
    "node_parents": ("the node's parent, by number within the record; -1: a root",
                     ("RF-I032", "RF-I041")),
    "pred_index": ("position within the record whose output predicts the target",
                   ("RF-I034", "RF-I036", "RF-I039")),
    "target_ids": ("token id that is to be predicted", ("RF-I007", "RF-I040")),
    "member_index": ("member whose loss term the target is", ("RF-I035", "RF-I036")),
    "member_leaf": ("node in which the member ends", ("RF-I037", "RF-I041")),
    "member_lengths": ("tokens of the member", ("RF-I038",)),
}  # fmt: skip

FLAGS: tuple[tuple[int, str, str, str], ...] = (
    (0, "support_missing", "the candidate set was asked for and is not there",
     "candidate_counts 0"),
    (1, "support_overflow", "the candidate set was too large to be kept", "candidate_counts 0"),
    (2, "log_prob_missing", "the sampler's log-prob is not there", "rollout_log_probs 0.0"),
    (3, "head_missing", "the sampler's head is not there", "topk_counts 0"),
    (4, "teacher_missing", "the teacher said nothing about the target",
     "teacher_topk_counts 0, teacher_log_probs 0.0"),
)  # fmt: skip
