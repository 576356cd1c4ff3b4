-- The named queries of `draftsmith query NAME`. A block begins with its name, says in one line what it answers, and names its
-- parameters with a type and a default; a parameter without a value is NULL and filters nothing.
--
--   -- query: NAME
--   -- about: one line
--   -- param: NAME text|int|float [= default]  what it is
--   -- first: NAME = SELECT ...                 one value that is asked for first, and is a parameter of what follows

-- query: columns
-- about: What every view and table, and every column of it, means.
-- param: of text  one view or table
SELECT table_name AS "of", column_name, data_type, comment
FROM (SELECT table_name, column_name, data_type, comment, column_index FROM duckdb_columns() WHERE NOT internal
      UNION ALL SELECT view_name, '', '', comment, 0 FROM duckdb_views() WHERE NOT internal)
WHERE $of IS NULL OR table_name = $of
ORDER BY NOT starts_with(table_name, 'v_'), table_name, column_index;

-- query: runs
-- about: Every run, newest first.
-- param: pipeline text  one pipeline only
-- param: limit int = 30  rows at most
SELECT started_at, pipeline, status, seconds, num_executed, num_reused, how, reason, run_id, draftsmith_version
FROM v_run WHERE $pipeline IS NULL OR pipeline = $pipeline
ORDER BY started_at DESC LIMIT $limit;

-- query: failures
-- about: What failed and why, newest first: steps, and runs without a step that did (not planned, cancelled, killed).
-- param: pipeline text  one pipeline only
-- param: limit int = 30  rows at most
WITH failed AS (SELECT ended_at, pipeline, step, why, seconds, run_id FROM step WHERE status = 'failed')
FROM (FROM failed UNION ALL
      SELECT ended_at, pipeline, NULL, reason, round(epoch(ended_at) - epoch(started_at), 1), run_id
      FROM run WHERE status IN ('failed', 'killed') AND run_id NOT IN (SELECT run_id FROM failed))
WHERE $pipeline IS NULL OR pipeline = $pipeline
ORDER BY ended_at DESC LIMIT $limit;

-- query: find-run
-- about: The run that a name means: the beginning of a run's id or of a key, a pipeline (its newest run), NAME@ALIAS or NAME@VERSION.
-- param: name text  the name
WITH found AS (
  SELECT 1 AS place, run_id, started_at FROM run WHERE starts_with(run_id, $name)
  UNION ALL
  SELECT 2, arg_max(run_id, started_at), max(started_at) FROM run WHERE pipeline = $name AND num_executed + num_reused > 0 HAVING count(*) > 0
  UNION ALL
  SELECT 3, run_id, published_at FROM v_version v
  WHERE $name = name || '@' || version OR (name, version) IN (SELECT (name, version) FROM v_alias WHERE $name = name || '@' || alias)
  UNION ALL
  SELECT 4, arg_max(run_id, created_at), max(created_at) FROM artifact WHERE length($name) >= 4 AND starts_with(artifact_key, $name) GROUP BY artifact_key)
SELECT f.run_id, r.pipeline, r.status, r.started_at
FROM found f LEFT JOIN run r USING (run_id) WHERE f.run_id IS NOT NULL
QUALIFY place = min(place) OVER () ORDER BY f.started_at DESC;

-- query: changes
-- about: What changed between two runs: parameters, steps, settings, code, data, machine and library versions (`draftsmith diff`).
-- param: run text  the later run; else the newest
-- param: before text  the earlier run; else the one before it of the same pipeline that had a step
-- first: run = SELECT coalesce($run, newest_run())
-- first: before = SELECT coalesce($before, run_before($run))
WITH side AS (SELECT run_id = $run AS is_later, * FROM run WHERE run_id IN ($run, $before)),
made AS (
  SELECT s.run_id = $run AS is_later, s.*, machine_name, a.info
  FROM v_step s LEFT JOIN v_machine USING (machine_id)
  LEFT JOIN artifact a ON a.artifact_key = s.artifact_key AND coalesce(a.session, '') = coalesce(s.session, '')
  WHERE s.run_id IN ($run, $before)),
fact AS (
  SELECT is_later, '' AS step, 'run' AS what, unnest(['pipeline', 'Draftsmith', 'commit', 'status']) AS name,
         unnest([pipeline, draftsmith_version, git_commit, status]) AS fact
  FROM side
  UNION ALL SELECT is_later, '', 'parameter', key, value ->> '$' FROM side, json_each(params)
  UNION ALL SELECT is_later, step, 'step', 'uses', uses FROM made
  UNION ALL SELECT is_later, step, 'setting', key, value ->> '$' FROM made, json_each(settings)
  UNION ALL SELECT is_later, step, 'input', key, array_to_string(value ->> '$[*][0]', ', ') FROM made, json_each(inputs)
  UNION ALL SELECT is_later, step, 'code', 'sha256', left(code_sha256, 12) FROM made
  UNION ALL SELECT is_later, step, 'data', 'key', left(artifact_key, 12) FROM made WHERE inputs = '{}'
  UNION ALL SELECT is_later, step, 'data', key, value ->> '$' FROM made, json_each(info)
            WHERE kind IN ('Prompts', 'Conversations', 'Features', 'Target') AND json_type(value) NOT IN ('OBJECT', 'ARRAY')
  UNION ALL SELECT is_later, step, 'machine', 'name', machine_name FROM made
  UNION ALL SELECT is_later, step, 'library', key, value ->> '$' FROM made, json_each(versions)),
pair AS (
  SELECT step, what, name, any_value(fact) FILTER (NOT is_later) AS before, any_value(fact) FILTER (is_later) AS after FROM fact GROUP BY ALL)
SELECT what, name, before, after, string_agg(step, ', ' ORDER BY step) AS steps
FROM pair
WHERE before IS DISTINCT FROM after
  AND (step = '' OR what = 'step' OR step IN (SELECT step FROM made GROUP BY step HAVING count(DISTINCT is_later) = 2))
  AND (what NOT IN ('code', 'machine', 'library') OR (before IS NOT NULL AND after IS NOT NULL))  -- NULL: nobody kept it
GROUP BY what, name, before, after
ORDER BY list_position(['run', 'parameter', 'step', 'setting', 'input', 'code', 'data', 'machine', 'library'], what), name, steps;

-- query: outcomes
-- about: What two runs chose and measured, drafter by drafter: depth, acceptance length, predicted and measured speedup with 95 % intervals.
-- param: run text  the later run; else the newest
-- param: before text  the earlier run; else the one before it of the same pipeline that had a step
-- first: run = SELECT coalesce($run, newest_run())
-- first: before = SELECT coalesce($before, run_before($run))
WITH used AS (SELECT * FROM step WHERE run_id IN ($run, $before)),
choice AS (
  SELECT u.run_id AS of_run, c.*
  FROM depth_choice c JOIN used u ON u.artifact_key = c.artifact_key AND coalesce(u.session, '') = coalesce(c.session, '')
  WHERE c.workload = 'all' AND c.kv_len IS NULL
  QUALIFY row_number() OVER (PARTITION BY u.run_id, c.draft_key, c.method, c.batch_size ORDER BY (c.speedup_meas IS NOT NULL) DESC, c.created_at DESC) = 1)
SELECT coalesce(d.step, CASE WHEN c.draft_key = '' THEN c.method ELSE 'registered ' || c.method END) AS drafter, c.batch_size,
       CASE c.of_run WHEN $run THEN 'after' ELSE 'before' END AS side, c.depth_k, c.verdict, e.al, e.al_lo, e.al_hi,
       c.speedup_pred, c.pred_lo, c.pred_hi, c.speedup_meas, c.meas_lo, c.meas_hi, machine_name
FROM choice c
LEFT JOIN used d ON d.run_id = c.of_run AND d.kind = 'Draft' AND d.artifact_key = c.draft_key
LEFT JOIN depth_eval e ON (e.artifact_key, e.created_at, e.draft_key, e.method, e.workload, e.batch_size, e.depth_k)
                        = (c.artifact_key, c.created_at, c.draft_key, c.method, c.workload, c.batch_size, c.depth_k) AND e.tree_budget IS NULL
LEFT JOIN v_machine m ON m.machine_id = c.machine_id
ORDER BY drafter, c.batch_size, side DESC;

-- query: times
-- about: Seconds and peak memory of each step of two runs; a reused step took none, and making_seconds are those of the run that made it.
-- param: run text  the later run; else the newest
-- param: before text  the earlier run; else the one before it of the same pipeline that had a step
-- first: run = SELECT coalesce($run, newest_run())
-- first: before = SELECT coalesce($before, run_before($run))
WITH made AS (SELECT run_id = $run AS is_later, * FROM v_step WHERE run_id IN ($run, $before))
SELECT step, any_value(status) FILTER (NOT is_later) AS status_before, any_value(status) FILTER (is_later) AS status_after,
       any_value(seconds) FILTER (NOT is_later) AS seconds_before, any_value(seconds) FILTER (is_later) AS seconds_after,
       any_value(making_seconds) FILTER (NOT is_later) AS making_seconds_before, any_value(making_seconds) FILTER (is_later) AS making_seconds_after,
       any_value(peak_rss_mib) FILTER (NOT is_later) AS peak_rss_mib_before, any_value(peak_rss_mib) FILTER (is_later) AS peak_rss_mib_after
FROM made GROUP BY step ORDER BY max(ended_at), step;

-- query: lineage
-- about: What a registered version was made from, step by step, with settings and machine (`draftsmith lineage` draws it).
-- param: model text  one registered model
-- param: alias text = champion  one alias
-- param: version int  instead of an alias: the number of a version
-- param: artifact text  instead of a version: an artifact, by the beginning of its key
-- first: roots = SELECT list(DISTINCT root_key) FROM (SELECT release_key AS root_key FROM versions_asked($model, $alias, $version) WHERE $artifact IS NULL UNION ALL SELECT artifact_key FROM v_artifact WHERE starts_with(artifact_key, $artifact))
SELECT v.name AS model, v.version, v.draft_key, l.distance, a.kind, a.pipeline, a.step, a.uses, a.seconds, machine_name, a.created_at, a.settings, a.inputs,
       a.info, a.run_id, l.artifact_key
FROM lineage_of(coalesce($roots, []), []) l
LEFT JOIN v_artifact a ON a.artifact_key = l.artifact_key
LEFT JOIN v_machine m ON m.machine_id = a.machine_id
LEFT JOIN versions_asked($model, $alias, $version) v ON $artifact IS NULL AND v.release_key = l.root_key
ORDER BY v.name, l.root_key, l.distance, a.created_at DESC, l.artifact_key;

-- query: sources
-- about: Which sources of rows the drafter behind a registered version learned from, with licences and numbers of rows.
-- param: model text  one registered model
-- param: alias text = champion  one alias
-- param: version int  instead of an alias: the number of a version
-- param: artifact text  instead of a version: a drafter, by the beginning of its key
-- first: roots = SELECT list(DISTINCT root_key) FROM (SELECT draft_key AS root_key FROM versions_asked($model, $alias, $version) WHERE $artifact IS NULL UNION ALL SELECT artifact_key FROM v_artifact WHERE kind = 'Draft' AND starts_with(artifact_key, $artifact))
SELECT v.name AS model, v.version, s.source, s.licence, s.rows_read, s.rows_kept, s.pipeline, s.step, s.uses, s.created_at,
       left(s.artifact_key, 12) AS artifact_key, left(l.root_key, 12) AS draft_key
FROM lineage_of(coalesce($roots, []), ['target', 'champion', 'policy', 'keep_out', 'seen']) l  -- not learned from
JOIN v_source s USING (artifact_key)
LEFT JOIN versions_asked($model, $alias, $version) v ON $artifact IS NULL AND v.draft_key = l.root_key
ORDER BY v.name, draft_key, s.rows_kept DESC, s.source;

-- query: sources-of
-- about: The sources of rows that some artifacts have read themselves.
-- param: keys text  their keys, with blanks between
SELECT artifact_key, source, licence, rows_read, rows_kept, pipeline, step FROM v_source
WHERE list_contains(string_split($keys, ' '), artifact_key) ORDER BY created_at, source;

-- query: artifacts
-- about: Every artifact, the newest first: kind, step, what making it took, and where.
-- param: kind text  one kind: Features, Draft, Release, ...
-- param: pipeline text  one pipeline only
-- param: limit int = 40  rows at most
SELECT created_at, kind, pipeline, step, seconds, peak_rss_mib, num_bytes, machine_name, run_id, artifact_key
FROM v_artifact LEFT JOIN (SELECT machine_id, machine_name FROM v_machine) USING (machine_id)
WHERE ($kind IS NULL OR kind = $kind) AND ($pipeline IS NULL OR pipeline = $pipeline)
ORDER BY created_at DESC LIMIT $limit;

-- query: losses
-- about: Loss curves: what training recorded as it went, of the newest drafters unless one is named.
-- param: artifact text  the beginning of a drafter's key
-- param: run text  the drafters of one run
-- param: name text = loss  one recorded number: loss, held_out_al, learning_rate, ...; empty for all
-- param: points int = 20  points of each curve at most, evenly apart, the last one among them
-- param: newest int = 4  drafters at most, if none is named
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('training_metric') ORDER BY 1 DESC LIMIT $newest)
WITH point AS (
  SELECT *, row_number() OVER of_curve AS n, count(*) OVER (PARTITION BY artifact_key, name) AS number
  FROM v_training
  WHERE ($artifact IS NULL OR starts_with(artifact_key, $artifact)) AND ($name IS NULL OR name = $name)
    AND ($run IS NULL OR artifact_key IN (SELECT artifact_key FROM step WHERE run_id = $run))
    AND ($artifact IS NOT NULL OR $run IS NOT NULL OR created_at >= $since)
  WINDOW of_curve AS (PARTITION BY artifact_key, name ORDER BY at_step))
SELECT pipeline, step, name, at_step, value, left(artifact_key, 12) AS artifact_key, created_at
FROM point WHERE number <= $points OR n = number OR (n * $points) // number <> ((n - 1) * $points) // number
ORDER BY created_at DESC, artifact_key, name, at_step;

-- query: memory
-- about: Peak memory and bytes of each step, the hungriest first, over every time that it was made.
-- param: pipeline text  one pipeline only
SELECT pipeline, step, uses, machine_name, count(*) AS times, max(peak_rss_mib) AS peak_rss_mib_max,
       arg_max(peak_rss_mib, a.created_at) AS peak_rss_mib_last, arg_max(num_bytes, a.created_at) AS num_bytes_last, max(a.created_at) AS last
FROM artifact a LEFT JOIN v_machine m ON m.machine_id = a.machine_id
WHERE $pipeline IS NULL OR pipeline = $pipeline
GROUP BY ALL ORDER BY peak_rss_mib_max DESC NULLS LAST, pipeline, step;

-- query: libraries
-- about: Which versions of which libraries made the artifacts, and since when; of one run what its artifacts were made with.
-- param: run text  one run
-- param: library text  one library
SELECT library, library_version, machine_name, count(*) AS artifacts, min(l.created_at) AS first, max(l.created_at) AS last
FROM v_library l LEFT JOIN v_machine m ON m.machine_id = l.machine_id
WHERE ($library IS NULL OR library = $library) AND ($run IS NULL OR artifact_key IN (SELECT artifact_key FROM step WHERE run_id = $run))
GROUP BY ALL ORDER BY library, last DESC, library_version;

-- query: disk
-- about: Bytes that artifacts took when they were made, by kind, pipeline and step, the largest first; `draftsmith du` says what is there now.
-- param: kind text  one kind: Features, Draft, Conversations, ...
-- param: pipeline text  one pipeline only
SELECT kind, pipeline, step, count(*) AS artifacts, sum(num_bytes)::BIGINT AS num_bytes, max(num_bytes) AS num_bytes_max,
       left(arg_max(artifact_key, num_bytes), 12) AS largest, max(created_at) AS last
FROM v_artifact WHERE ($kind IS NULL OR kind = $kind) AND ($pipeline IS NULL OR pipeline = $pipeline)
GROUP BY ALL ORDER BY num_bytes DESC NULLS LAST, kind, pipeline, step;

-- query: durations
-- about: How long each step takes when it is not reused, the slowest first.
-- param: pipeline text  one pipeline only
SELECT pipeline, step, uses, count(*) AS times, round(median(seconds), 2) AS seconds_p50, round(max(seconds), 2) AS seconds_max,
       max(ended_at) AS last
FROM step WHERE status = 'completed' AND ($pipeline IS NULL OR pipeline = $pipeline)
GROUP BY ALL ORDER BY seconds_p50 DESC;

-- query: latest
-- about: The depth to serve with now: the newest choice of each pipeline, method and machine.
-- param: workload text = all  one workload
-- param: method text  one method
-- param: model text  one model
SELECT pipeline, model, method, workload, batch_size, kv_len, depth_k, verdict, speedup_meas, meas_lo, meas_hi, speedup_pred, pred_error,
       machine_name, left(draft_key, 12) AS draft_key, created_at
FROM v_latest LEFT JOIN (SELECT machine_id, machine_name FROM v_machine) USING (machine_id) WHERE ($workload IS NULL OR workload = $workload) AND ($method IS NULL OR method = $method)
  AND ($model IS NULL OR model = $model)
ORDER BY created_at DESC, pipeline, method;

-- query: depths
-- about: Every depth, predicted beside measured, of the newest selections.
-- param: method text  one method
-- param: workload text = all  one workload
-- param: limit int = 60  rows at most
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('depth_eval') WHERE ($workload IS NULL OR workload = $workload) AND ($method IS NULL OR method = $method) ORDER BY 1 DESC LIMIT $limit)
SELECT method, workload, batch_size, depth_k, tree_budget, al, al_lo, al_hi, al_meas, al_replayed, cost_ratio, speedup_pred, pred_lo, pred_hi, speedup_meas,
       meas_lo, meas_hi, marginal_gain, marginal_cost, p_best, regret, left(draft_key, 12) AS draft_key, created_at
FROM depths_since($since) WHERE ($workload IS NULL OR workload = $workload) AND ($method IS NULL OR method = $method)
ORDER BY created_at DESC, method, draft_key, workload, batch_size, depth_k LIMIT $limit;

-- query: workloads
-- about: The depth that each workload would choose for itself, and what it loses at the one depth for all.
-- param: method text  one method
-- param: limit int = 60  rows at most
SELECT created_at, method, workload, batch_size, kv_len, depth_k, verdict, speedup_pred, pred_lo, pred_hi, speedup_meas, loss,
       left(draft_key, 12) AS draft_key
FROM v_choice WHERE $method IS NULL OR method = $method
ORDER BY created_at DESC, method, draft_key, workload LIMIT $limit;

-- query: languages
-- about: Acceptance length by language of drafters that learned from different mixes, newest first.
-- param: language text  one language (en, zh, ..., all)
-- param: pipeline text  one pipeline only
-- param: limit int = 60  rows at most
SELECT created_at, language, trained_on, num_prompts, method, depth_k, al, al_lo, al_hi, change, change_lo, change_hi, verdict, coverage,
       left(draft_key, 12) AS draft_key
FROM v_language WHERE ($language IS NULL OR language = $language) AND ($pipeline IS NULL OR pipeline = $pipeline)
ORDER BY created_at DESC, language, verdict <> 'baseline', trained_on LIMIT $limit;

-- query: contexts
-- about: Acceptance length by context length, tokens in the cache when a round began, of the newest selections.
-- param: method text  one method
-- param: depth int  one depth
-- param: limit int = 60  rows at most
SELECT created_at, method, depth_k, context_from, context_to, al, al_lo, al_hi, num_prompts, num_rounds, num_tokens,
       left(draft_key, 12) AS draft_key
FROM newest('acceptance_by_context')
WHERE ($method IS NULL OR method = $method) AND ($depth IS NULL OR depth_k = $depth)
ORDER BY created_at DESC, method, draft_key, depth_k, context_from LIMIT $limit;

-- query: edge
-- about: 3 and 7 drafts, the common settings on CPUs, beside the chosen depth.
-- param: method text  one method
-- param: limit int = 30  rows at most
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('depth_choice') WHERE $method IS NULL OR method = $method ORDER BY 1 DESC LIMIT $limit)
WITH depths AS MATERIALIZED (SELECT * FROM depths_since($since) WHERE workload = 'all' AND tree_budget IS NULL)
SELECT c.created_at, c.method, c.batch_size, c.depth_k AS chosen, at_chosen.speedup_pred AS pred_chosen, at_3.speedup_pred AS pred_3,
       at_7.speedup_pred AS pred_7, at_chosen.speedup_meas AS meas_chosen, at_3.speedup_meas AS meas_3, at_7.speedup_meas AS meas_7,
       left(c.draft_key, 12) AS draft_key
FROM v_choice c
LEFT JOIN depths at_chosen ON (at_chosen.selection_id, at_chosen.draft_key, at_chosen.workload, at_chosen.batch_size, at_chosen.depth_k)
                             = (c.selection_id, c.draft_key, c.workload, c.batch_size, c.depth_k)
LEFT JOIN depths at_3 ON (at_3.selection_id, at_3.draft_key, at_3.workload, at_3.batch_size, at_3.depth_k)
                        = (c.selection_id, c.draft_key, c.workload, c.batch_size, 3)
LEFT JOIN depths at_7 ON (at_7.selection_id, at_7.draft_key, at_7.workload, at_7.batch_size, at_7.depth_k)
                        = (c.selection_id, c.draft_key, c.workload, c.batch_size, 7)
WHERE c.created_at >= $since AND c.workload = 'all' AND c.kv_len IS NULL AND ($method IS NULL OR c.method = $method)
ORDER BY c.created_at DESC, c.method LIMIT $limit;

-- query: gaps
-- about: Predictions that a measurement contradicts by more than a share.
-- param: more_than float = 0.1  the share
-- param: newest int = 500  measurements to look at
-- param: limit int = 30  rows at most
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('depth_eval') ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, workload, batch_size, depth_k, tree_budget, speedup_pred, speedup_meas, meas_lo, meas_hi, pred_error,
       machine_name, left(draft_key, 12) AS draft_key
FROM depths_since($since) LEFT JOIN (SELECT machine_id, machine_name FROM v_machine) USING (machine_id)  -- of several measurements the newest, so one that was settled since does not show
WHERE abs(pred_error) > $more_than
ORDER BY created_at DESC, abs(pred_error) DESC LIMIT $limit;

-- query: acceptance
-- about: Acceptance length of decoding by every convention: pooled and per prompt, with and without the bonus token and what lies past the end.
-- param: method text  one method
-- param: workload text = all  one workload
-- param: newest int = 20  measurements to look at
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('request') WHERE num_rounds > 0 AND depth_k > 0 AND ($workload IS NULL OR $workload IN ('all', workload)) AND ($method IS NULL OR method = $method) ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, depth_k, tree_budget, workload, batch_size, temperature, dtype, requests, rounds, al, al_macro,
       al_with_overshoot, accepted_per_round, accepted_per_round_macro, draft_acceptance_rate, draft_acceptance_rate_macro,
       left(draft_key, 12) AS draft_key, left(artifact_key, 12) AS artifact_key
FROM v_acceptance
WHERE created_at >= $since AND ($workload IS NULL OR workload = $workload) AND ($method IS NULL OR method = $method)
ORDER BY created_at DESC, method, depth_k, workload;

-- query: positions
-- about: How often the i-th draft is kept, by every convention; the newest measurement unless one is named.
-- param: artifact text  the beginning of the key of an end-to-end measurement
-- param: method text  one method
-- param: workload text = all  one workload
-- first: at = SELECT max(created_at) FROM newest('request') WHERE num_rounds > 0 AND ($artifact IS NULL OR starts_with(artifact_key, $artifact)) AND ($method IS NULL OR method = $method)
SELECT method, depth_k, tree_budget, workload, batch_size, position, rounds, accepted_in_all, drafted, reached, accepted, accept_uncond, accept_cond,
       accept_joint, accept_of_rounds, accept_uncond_macro, accept_cond_macro
FROM v_position
WHERE created_at = $at AND ($artifact IS NULL OR starts_with(artifact_key, $artifact))
  AND ($workload IS NULL OR workload = $workload) AND ($method IS NULL OR method = $method)
ORDER BY method, depth_k, batch_size, workload, position;

-- query: training-gap
-- about: How far the training metric flatters: acceptance with teacher-forced inputs at every position, and without.
-- param: method text  one method
-- param: newest int = 10  measurements to look at
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('acceptance_map') WHERE $method IS NULL OR method = $method ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, tree_budget, position, positions, accept_joint_teacher_forced, accept_joint_everywhere,
       left(draft_key, 12) AS draft_key
FROM v_map WHERE created_at >= $since AND workload = 'all' AND ($method IS NULL OR method = $method)
ORDER BY created_at DESC, method, position;

-- query: speedups
-- about: Each measured arm against the best plain decoding of its session and engine, newest measurements first.
-- param: method text  one method
-- param: workload text = all  one workload
-- param: newest int = 20  measurements to look at
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('request') WHERE method <> 'none' AND ($workload IS NULL OR $workload IN ('all', workload)) AND ($method IS NULL OR method = $method) ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, depth_k, tree_budget, workload, batch_size, dtype, engine, tokens_per_s, plain_tokens_per_s, speedup, speedup_e2e,
       requests, left(draft_key, 12) AS draft_key, left(artifact_key, 12) AS artifact_key
FROM v_speedup
WHERE created_at >= $since AND ($workload IS NULL OR workload = $workload) AND ($method IS NULL OR method = $method)
ORDER BY created_at DESC, method, depth_k;

-- query: throughput
-- about: Tokens a second of all requests decoded together, by batch size, and over plain decoding of the same batch size.
-- param: method text  one method
-- param: newest int = 10  measurements to look at
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('request') WHERE NOT is_warmup AND ($method IS NULL OR method = $method) ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, depth_k, tree_budget, batch_size, dtype, kernel, engine, batches, requests, throughput_tokens_per_s, throughput_speedup, left(draft_key, 12) AS draft_key
FROM v_throughput
WHERE created_at >= $since AND ($method IS NULL OR method IN ($method, 'none'))
ORDER BY created_at DESC, batch_size, method, depth_k;

-- query: costs
-- about: What a pass costs, by batch size and context length; the newest measurements.
-- param: method text  one method
-- param: phase text  target_step, verify, draft, host, control, prefill or draft_prefill
-- param: newest int = 10  measurements to look at
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('cost_cell') WHERE ($method IS NULL OR method = $method) AND ($phase IS NULL OR phase = $phase) ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, phase, depth_k, tree_budget, batch_size, kv_len, num_rows, ms_p50, ms_min, ms_max, blocks, dtype, num_threads,
       machine_name
FROM v_cost LEFT JOIN (SELECT machine_id, machine_name FROM v_machine) USING (machine_id)
WHERE created_at >= $since AND ($method IS NULL OR method = $method) AND ($phase IS NULL OR phase = $phase)
ORDER BY created_at DESC, method, phase, batch_size, kv_len, depth_k;

-- query: parity
-- about: Is the output that of plain decoding? Ties, those that rounding makes expect, and divergences of each arm, newest measurements.
-- param: newest int = 20  measurements to look at
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('request') ORDER BY 1 DESC LIMIT $newest)
SELECT created_at, method, depth_k, tree_budget, batch_size, dtype, temperature, compared, identical, ties, expected_ties, divergences,
       earliest_divergence, first_wrong, largest_shortfall, left(draft_key, 12) AS draft_key
FROM v_parity WHERE created_at >= $since ORDER BY divergences DESC, created_at DESC;

-- query: engines
-- about: Acceptance as serving engines counted it themselves, newest first.
-- param: engine text  one engine
-- param: limit int = 40  rows at most
SELECT created_at, engine, engine_version, method, depth_k, workload, concurrency, requests, rounds, al_with_overshoot,
       accepted_per_round, draft_acceptance_rate, accept_of_rounds, source, left(draft_key, 12) AS draft_key
FROM v_engine_acceptance WHERE $engine IS NULL OR engine = $engine ORDER BY created_at DESC LIMIT $limit;

-- query: engines_beside_ours
-- about: Predicted, ours and the engine side by side: texts, acceptance length and speedup of the same drafter on the same prompts.
-- param: engine text  one engine
-- param: workload text = all  one workload
-- param: limit int = 40  rows at most
SELECT created_at, engine, engine_version, method, depth_k, workload, verdict, num_identical, num_ties, num_compared, al_pred, al_ours, al_engine,
       num_paired, num_different, speedup_pred, speedup_ours, speedup_engine, left(draft_key, 12) AS draft_key
FROM v_engine_comparison
WHERE ($engine IS NULL OR engine = $engine) AND ($workload IS NULL OR workload = $workload)
ORDER BY created_at DESC, engine, method, depth_k LIMIT $limit;

-- query: flags
-- about: Reasons to doubt a number, the worst and newest first.
-- param: severity text  fault, warning or info
-- param: limit int = 50  rows at most
SELECT created_at, severity, code, method, value, detail, pipeline, step, left(artifact_key, 12) AS artifact_key
FROM v_flags WHERE $severity IS NULL OR severity = $severity
ORDER BY list_position(['fault', 'warning', 'info'], severity), created_at DESC LIMIT $limit;

-- query: comparisons
-- about: Challenger against champion on the same prompts, with intervals.
-- param: limit int = 30  rows at most
SELECT created_at, quantity, workload, method, ratio, lo, hi, verdict, num_prompts, challenger_depth, champion_depth,
       left(challenger_key, 12) AS challenger_key,
       left(champion_key, 12) AS champion_key
FROM v_comparison ORDER BY created_at DESC, quantity, workload LIMIT $limit;

-- query: drift
-- about: Acceptance length on new traffic against that at release.
-- param: limit int = 30  rows at most
SELECT created_at, method, workload, workload_then, depth_k, al_then, al_now, change, lo, hi, drifted, num_prompts_then, num_prompts_now,
       left(draft_key, 12) AS draft_key
FROM newest('drift') ORDER BY created_at DESC, workload LIMIT $limit;

-- query: tuning
-- about: Acceptance length before and after: what tuning brought, what a changed target cost, what came back; greedy against sampled answers.
-- param: what text  tuning, target (the older one against that of now), both, sampled or sampled_tuned
-- param: limit int = 30  rows at most
SELECT created_at, method, what, workload, depth_k, al_before, al_after, change, lo, hi, verdict, came_back, came_back_lo, came_back_hi, num_prompts,
       left(before_draft_key, 12) AS before_draft_key, left(draft_key, 12) AS draft_key
FROM newest('acceptance_change') WHERE $what IS NULL OR what = $what ORDER BY created_at DESC, workload, what LIMIT $limit;

-- query: promotions
-- about: Every move of an alias and every newer evidence: who, why, from which version to which.
-- param: name text  one registered model
-- param: limit int = 50  rows at most
SELECT promoted_at, name, alias, action, from_version, to_version, who, why
FROM promotion WHERE $name IS NULL OR name = $name ORDER BY promoted_at DESC LIMIT $limit;

-- query: champions
-- about: Which version each alias of each model is at now, and since when.
SELECT name, alias, version, action, promoted_at AS since, who, why, left(release_key, 12) AS release_key, run_id FROM v_alias ORDER BY name, alias;

-- query: machines
-- about: What was measured where: runs, the newest measured speedup and its depth, by machine and method.
SELECT machine_name, method, count(DISTINCT run_id) AS runs, arg_max(depth_k, created_at) FILTER (WHERE speedup_meas IS NOT NULL) AS depth_k,
       arg_max(speedup_meas, created_at) AS speedup_meas,
       median(speedup_meas) AS speedup_meas_p50, min(speedup_meas) AS speedup_meas_min, max(speedup_meas) AS speedup_meas_max, max(created_at) AS last
FROM v_choice LEFT JOIN (SELECT machine_id, machine_name FROM v_machine) USING (machine_id)
WHERE workload = 'all' AND kv_len IS NULL GROUP BY ALL ORDER BY machine_name, method;

-- query: versions
-- about: Measured speedup, and how far predictions were from it, by version of Draftsmith and method.
-- param: method text  one method
SELECT a.draftsmith_version, d.method, count(*) AS choices, median(d.speedup_meas) AS speedup_meas_p50, median(abs(d.pred_error)) AS abs_pred_error_p50,
       max(d.created_at) AS last
FROM v_choice d JOIN artifact a USING (artifact_key, created_at)
WHERE d.workload = 'all' AND d.kv_len IS NULL AND d.verdict <> 'invalid' AND ($method IS NULL OR d.method = $method)
GROUP BY ALL ORDER BY last DESC, d.method;

-- query: methods
-- about: One line a drafter: parameters, training minutes, the chosen depth, acceptance length, predicted and measured speedup.
-- param: limit int = 40  rows at most
-- first: since = SELECT min(created_at) FROM (SELECT DISTINCT created_at FROM newest('depth_choice') ORDER BY 1 DESC LIMIT $limit)
SELECT c.created_at, c.method, d.parameters, round(d.training_minutes, 2) AS training_minutes, c.depth_k, c.verdict, e.al, e.al_lo, e.al_hi,
       e.cost_ratio, c.speedup_pred, c.speedup_meas, c.meas_lo, c.meas_hi, left(c.draft_key, 12) AS draft_key
FROM v_choice c
LEFT JOIN v_draft d USING (draft_key)
LEFT JOIN depths_since($since) e ON (e.selection_id, e.draft_key, e.method, e.workload, e.batch_size, e.depth_k)
                     = (c.selection_id, c.draft_key, c.method, c.workload, c.batch_size, c.depth_k) AND e.tree_budget IS NULL
WHERE c.created_at >= $since AND c.workload = 'all' AND c.kv_len IS NULL
ORDER BY c.created_at DESC, coalesce(c.speedup_meas, c.speedup_pred) DESC LIMIT $limit;
