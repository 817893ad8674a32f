"""The database's tables. One writer (the controller), many readers."""

from __future__ import annotations

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- data: model.jobs.Job as JSON, without its spec; the other columns repeat what is searched for. spec: its digest.
-- tasks: how many jobs the row stands for: tasks of an array that differ in nothing share one; see model.arrays.
CREATE TABLE jobs (
  id TEXT PRIMARY KEY, array_id TEXT, state TEXT NOT NULL, user TEXT NOT NULL, partition TEXT NOT NULL,
  submit_time REAL NOT NULL, end_time REAL, data BLOB NOT NULL, spec BLOB, tasks INTEGER NOT NULL DEFAULT 1
) WITHOUT ROWID;
CREATE INDEX jobs_state ON jobs (state, submit_time);
CREATE INDEX jobs_array ON jobs (array_id, state) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_shared ON jobs (array_id, state, tasks) WHERE tasks > 1;
CREATE INDEX jobs_user ON jobs (user, submit_time);
CREATE INDEX jobs_end ON jobs (end_time) WHERE end_time IS NOT NULL;
CREATE INDEX jobs_submit ON jobs (submit_time);
-- Waiting jobs that a policy stopped for others: few, of which every status wants the number.
CREATE INDEX jobs_stopped ON jobs (id)
  WHERE state = 'PENDING' AND instr(data, CAST('"preemptions":{' AS BLOB)) > 0;

-- What was asked for, once for all jobs that ask for the same, as the tasks of an array do; see queue.rows.
-- digest: of data, which is model.jobs.JobSpec as JSON.
CREATE TABLE specs (digest BLOB PRIMARY KEY, data BLOB NOT NULL);

-- One row per started attempt, kept for ever: the history that utilization, fair share and replay are computed from.
-- worked_until: when the work of an attempt that was stopped to be resized ended: when it was asked to save, or, where
-- it did not save, when it had saved last; NULL: with the attempt, or not known. account, qos: the group and the class
-- of service that it counted for; NULL: none, or not known.
CREATE TABLE runs (
  job_id TEXT NOT NULL, attempt INTEGER NOT NULL, user TEXT NOT NULL, partition TEXT NOT NULL, flavor TEXT,
  share REAL NOT NULL, gpus INTEGER NOT NULL, start_time REAL NOT NULL, end_time REAL, outcome TEXT,
  allocation BLOB NOT NULL, worked_until REAL, account TEXT, qos TEXT, PRIMARY KEY (job_id, attempt)
) WITHOUT ROWID;
CREATE INDEX runs_time ON runs (start_time);
CREATE INDEX runs_open ON runs (end_time) WHERE end_time IS NULL;
CREATE INDEX runs_end ON runs (end_time) WHERE end_time IS NOT NULL;

-- What is, or may be, on the nodes: one row per rank from the intent to launch it until its folder is removed.
CREATE TABLE ranks (
  job_id TEXT NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, node TEXT NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (job_id, attempt, rank)
) WITHOUT ROWID;

CREATE TABLE events (
  seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, job_id TEXT, node TEXT, user TEXT, data BLOB NOT NULL
);
CREATE INDEX events_job ON events (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX events_node ON events (node) WHERE node IS NOT NULL;

-- data: queue.store.NodeRecord as JSON, with the last reading.
CREATE TABLE nodes (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;

-- Sums over one node, one holder ('' = nobody) and one bucket of time; see accounting.py.
CREATE TABLE usage (
  bucket INTEGER NOT NULL, node TEXT NOT NULL, job_id TEXT NOT NULL, user TEXT NOT NULL, partition TEXT NOT NULL,
  gpu_s REAL NOT NULL, energy_j REAL NOT NULL, energy_unknown_s REAL NOT NULL, util_s REAL NOT NULL,
  util_known_s REAL NOT NULL, idle_s REAL NOT NULL,
  PRIMARY KEY (bucket, node, job_id)
) WITHOUT ROWID;
CREATE INDEX usage_job ON usage (job_id);

-- Command files applied already (applied_files since a later version): applying one twice changes nothing.
CREATE TABLE folded (file_name TEXT PRIMARY KEY, time REAL NOT NULL) WITHOUT ROWID;

-- Every change of a partition's live policy, kept for ever; the last row says what decides there.
-- data: queue.promotions.PolicyChange as JSON.
CREATE TABLE policy_changes (seq INTEGER PRIMARY KEY, partition TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX policy_changes_partition ON policy_changes (partition, seq);

-- Policies that are asked beside the live one. data: queue.promotions.Shadow as JSON, with its counts.
CREATE TABLE shadows (partition TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;

-- Where a shadow decided otherwise than the live policy; the last ones only.
CREATE TABLE shadow_differences (
  seq INTEGER PRIMARY KEY, partition TEXT NOT NULL, time REAL NOT NULL, data BLOB NOT NULL
);
CREATE INDEX shadow_differences_partition ON shadow_differences (partition, seq);

-- When each waiting job was expected to start, predicted once; a job that no run forward reaches has no row yet.
CREATE TABLE predictions (
  job_id TEXT PRIMARY KEY, partition TEXT NOT NULL, made REAL NOT NULL, median REAL NOT NULL, low REAL NOT NULL,
  high REAL, by_limits REAL
) WITHOUT ROWID;
CREATE INDEX predictions_made ON predictions (made);

-- How long each job was expected to run, in seconds, estimated once by a predictor; see queue.predictions.
CREATE TABLE estimates (job_id TEXT PRIMARY KEY, seconds REAL NOT NULL, predictor TEXT NOT NULL) WITHOUT ROWID;

-- How far each attempt came that reported it, kept for ever. data: model.progress.JobProgress as JSON. open: 0 once the
-- job has ended.
CREATE TABLE progress (
  job_id TEXT NOT NULL, attempt INTEGER NOT NULL, open INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (job_id, attempt)
) WITHOUT ROWID;
CREATE INDEX progress_open ON progress (open) WHERE open = 1;

-- The estimate of each job class, from the speeds of ended attempts. data: model.interference.JobClassEstimate as JSON.
CREATE TABLE beliefs (kind TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;

-- Those paces with their GPUs, the latest only. data: model.interference.AttemptSpeed as JSON.
CREATE TABLE paces (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);

-- Notices to people. due: when it is sent next; NULL: it has arrived, or was sent in vain too often. failed: 1 where
-- the last try failed. data: model.notices.Notice as JSON.
CREATE TABLE notices (
  key TEXT PRIMARY KEY, made REAL NOT NULL, due REAL, failed INTEGER NOT NULL, data BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX notices_due ON notices (due) WHERE due IS NOT NULL;
CREATE INDEX notices_failed ON notices (made) WHERE failed = 1;

-- Nodes kept for some, or for nobody, for a time; those that are over stay, for replays. data:
-- model.reservations.Reservation as JSON. Of those that are not over, names differ.
CREATE TABLE reservations (seq INTEGER PRIMARY KEY, name TEXT NOT NULL, until REAL NOT NULL, data BLOB NOT NULL);
CREATE INDEX reservations_until ON reservations (until);
"""

# From each version to the next. A new database gets SCHEMA and then all of these, too.
MIGRATIONS: tuple[str, ...] = (
    """
-- Events whose kinds had other names.
UPDATE events SET kind = CASE kind WHEN 'agent_out' THEN 'agent_disabled' WHEN 'agent_back' THEN 'agent_enabled'
  ELSE 'start_prediction_failed' END WHERE kind IN ('agent_out', 'agent_back', 'foretelling_failed');
""",
    """
-- The key most of a shape (model.interference.JobShape) is now max_gpus_per_node,
-- place_wait_s of a policy placement_wait_s.
UPDATE beliefs SET data = CAST(replace(CAST(data AS TEXT), '"most":', '"max_gpus_per_node":') AS BLOB);
UPDATE paces SET data = CAST(replace(CAST(data AS TEXT), '"most":', '"max_gpus_per_node":') AS BLOB);
UPDATE policy_changes SET data = CAST(replace(CAST(data AS TEXT), '"place_wait_s":', '"placement_wait_s":') AS BLOB);
UPDATE shadows SET data = CAST(replace(CAST(data AS TEXT), '"place_wait_s":', '"placement_wait_s":') AS BLOB);
""",
    """
-- An attempt that is resized while it runs has a row for each part of it; span: 0, 1, 2 ... The key's columns stand
-- first: in a table WITHOUT ROWID where they do not, quick_check of SQLite 3.40 looks for NULL in the wrong ones.
CREATE TABLE runs_by_span (
  job_id TEXT NOT NULL, attempt INTEGER NOT NULL, span INTEGER NOT NULL, user TEXT NOT NULL, partition TEXT NOT NULL,
  flavor TEXT, share REAL NOT NULL, gpus INTEGER NOT NULL, start_time REAL NOT NULL, end_time REAL, outcome TEXT,
  allocation BLOB NOT NULL, worked_until REAL, account TEXT, qos TEXT, PRIMARY KEY (job_id, attempt, span)
) WITHOUT ROWID;
INSERT INTO runs_by_span
  SELECT job_id, attempt, 0, user, partition, flavor, share, gpus, start_time, end_time, outcome, allocation,
    worked_until, account, qos FROM runs;
DROP TABLE runs;
ALTER TABLE runs_by_span RENAME TO runs;
CREATE INDEX runs_time ON runs (start_time);
CREATE INDEX runs_open ON runs (end_time) WHERE end_time IS NULL;
CREATE INDEX runs_end ON runs (end_time) WHERE end_time IS NOT NULL;
""",
    """
-- Sums of all that was ever added to usage, by partition; held: 1 of GPUs that jobs held. For metrics, which must not
-- decrease when rows of usage are removed.
CREATE TABLE usage_totals (
  partition TEXT NOT NULL, held INTEGER NOT NULL, gpu_s REAL NOT NULL, energy_j REAL NOT NULL,
  energy_unknown_s REAL NOT NULL, util_s REAL NOT NULL, util_known_s REAL NOT NULL, idle_s REAL NOT NULL,
  PRIMARY KEY (partition, held)
) WITHOUT ROWID;
INSERT INTO usage_totals
  SELECT partition, job_id != '', sum(gpu_s), sum(energy_j), sum(energy_unknown_s), sum(util_s), sum(util_known_s),
    sum(idle_s) FROM usage GROUP BY 1, 2;
""",
    """
-- Results of the site's own checks. data: model.healthchecks.CheckRecord as JSON, with the latest values.
CREATE TABLE health_checks (node TEXT NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (node, name))
  WITHOUT ROWID;
""",
    """
-- Joules measured while GPUs were idle, and their GPU seconds without such a measurement, as all of earlier versions.
ALTER TABLE usage ADD COLUMN idle_energy_j REAL NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN idle_energy_unknown_s REAL NOT NULL DEFAULT 0;
UPDATE usage SET idle_energy_unknown_s = idle_s;
""",
    """
-- Entries of the audit log, until they are in its files; see queue.audit. AUTOINCREMENT: no number is given twice.
-- data: model.audit.AuditEntry as JSON.
CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB NOT NULL);
""",
    """
ALTER TABLE folded RENAME TO applied_files;
""",
)
FIRST_VERSION = 13  # of SCHEMA; databases of versions before it cannot be opened
SCHEMA_VERSION = FIRST_VERSION + len(MIGRATIONS)
