-- Views over the history: every published number, each under the name of its convention.
--
-- Counts are stored (components/rows.py), conventions are made here. Words used throughout:
--   round     one draft-and-verify pass: d drafted, a accepted, normally a + 1 emitted (the bonus token is the target's own).
--             A round starts after the prefill token, which belongs to no round.
--   pooled    sums over rounds; macro: the mean over requests of each request's own figure. They differ by up to 23 %.
--   uncond    accepted to position i, over rounds that drafted i.  cond: over those that had also accepted i - 1.
-- What nobody reached or measured is NULL, never 0. workload 'all' is every workload together. Warm-up never counts.
-- The tables acceptance_map, cost_cell, request, round, depth_eval, depth_choice, quality_flag, run, step, artifact and
-- promotion are views over the Parquet files, made before these.

CREATE VIEW runs AS
SELECT run_id, pipeline, status, reason, num_executed, num_reused, round(epoch(ended_at) - epoch(started_at), 1) AS seconds,
       started_at, ended_at, how, params, git_commit, draftsmith_version
FROM run ORDER BY started_at DESC;

CREATE VIEW steps AS
SELECT run_id, pipeline, step, status, kind, artifact_key, why, seconds, uses, settings, inputs, ended_at FROM step ORDER BY ended_at DESC;

CREATE VIEW artifacts AS
SELECT artifact_key, kind, pipeline, step, seconds, created_at, uses, settings, inputs, info, machine_id, machine, run_id,
       draftsmith_version
FROM artifact ORDER BY created_at DESC;

-- Every move of an alias, oldest first; MLflow itself keeps no such history.
CREATE VIEW promotions AS
SELECT promoted_at, name, alias, action, from_version, to_version, who, why, numbers, promotion_id FROM promotion ORDER BY promoted_at, promotion_id;

-- One row for each arm: everything that could change a number, except the prompt and the repetition.
CREATE VIEW v_acceptance AS
WITH per_request AS (
  SELECT q.artifact_key, q.session_id, q.target_key, q.draft_key, q.method, q.depth_k, q.batch_size, q.temperature, q.dtype,
         q.kernel, q.num_threads, q.workload, q.request_id, sum(r.accepted) AS a, sum(r.drafted) AS d, count(*) AS n
  FROM round r JOIN request q USING (artifact_key, request_id)
  WHERE NOT q.is_warmup AND q.status <> 'error' AND q.method <> 'none'
  GROUP BY ALL)
SELECT artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel, num_threads,
       coalesce(workload, 'all') AS workload, count(*) AS requests, sum(n)::BIGINT AS rounds, sum(d)::BIGINT AS drafted,
       sum(a)::BIGINT AS accepted,
       1 + sum(a) / sum(n) AS al_pooled_incl_bonus,
       sum(a) / sum(n) AS accepted_per_round_excl_bonus,
       avg(1 + a / n) AS al_macro_incl_bonus,
       sum(a) / nullif(sum(d), 0) AS draft_acceptance_rate
FROM per_request
GROUP BY GROUPING SETS (
  (artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel, num_threads, workload),
  (artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel, num_threads));

-- Numerators and denominators are kept, so that a position no round reached stays NULL.
CREATE VIEW v_position AS
SELECT q.artifact_key, q.session_id, q.target_key, q.draft_key, q.method, q.depth_k, q.batch_size, q.temperature, q.dtype, q.kernel,
       q.num_threads, coalesce(q.workload, 'all') AS workload, p.position, count(*) AS rounds,
       count(*) FILTER (WHERE r.drafted >= p.position) AS drafted,
       count(*) FILTER (WHERE r.drafted >= p.position AND r.accepted >= p.position - 1) AS reached,
       count(*) FILTER (WHERE r.drafted >= p.position AND r.accepted >= p.position) AS accepted,
       count(*) FILTER (WHERE r.drafted >= p.position AND r.accepted >= p.position)
         / nullif(count(*) FILTER (WHERE r.drafted >= p.position), 0) AS accept_uncond,
       count(*) FILTER (WHERE r.drafted >= p.position AND r.accepted >= p.position)
         / nullif(count(*) FILTER (WHERE r.drafted >= p.position AND r.accepted >= p.position - 1), 0) AS accept_cond
FROM round r JOIN request q USING (artifact_key, request_id) JOIN (SELECT unnest(range(1, 65)) AS position) p ON p.position <= q.depth_k
WHERE NOT q.is_warmup AND q.status <> 'error' AND q.method <> 'none'
GROUP BY GROUPING SETS (
  (q.artifact_key, q.session_id, q.target_key, q.draft_key, q.method, q.depth_k, q.batch_size, q.temperature, q.dtype, q.kernel,
   q.num_threads, q.workload, p.position),
  (q.artifact_key, q.session_id, q.target_key, q.draft_key, q.method, q.depth_k, q.batch_size, q.temperature, q.dtype, q.kernel,
   q.num_threads, p.position));

-- What the offline map says at every output position, which flatters: real rounds start just after a failure. proxy is the same
-- with teacher-forced inputs (the training metric). Neither is an acceptance length of decoding; v_acceptance is.
CREATE VIEW v_map AS
WITH cell AS (
  SELECT m.artifact_key, m.target_key, m.draft_key, m.method, m.workload, m.dtype, p.position,
         unnest(m.accepted) AS a, unnest(m.proxy_accepted) AS proxy
  FROM acceptance_map m JOIN (SELECT unnest(range(1, 65)) AS position) p ON p.position <= m.k_max)
SELECT artifact_key, target_key, draft_key, method, dtype, coalesce(workload, 'all') AS workload, position, count(a) AS positions,
       count(*) FILTER (WHERE a >= position) / nullif(count(a), 0) AS accept_joint_everywhere,
       count(*) FILTER (WHERE proxy >= position) / nullif(count(proxy), 0) AS accept_joint_teacher_forced
FROM cell
GROUP BY GROUPING SETS ((artifact_key, target_key, draft_key, method, dtype, workload, position),
                        (artifact_key, target_key, draft_key, method, dtype, position));

-- Decode speed excludes prefill and the token that prefill makes; e2e includes both. tpot: time per output token.
CREATE VIEW v_speed AS
SELECT artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel, num_threads,
       coalesce(workload, 'all') AS workload, count(*) AS requests, sum(tokens_kept)::BIGINT AS tokens_kept,
       1e9 * sum(tokens_kept - 1) / nullif(sum(decode_ns), 0) AS tok_s_decode,
       1e9 * sum(tokens_kept) / nullif(sum(ttft_ns + decode_ns), 0) AS tok_s_e2e,
       median(ttft_ns) / 1e6 AS ttft_ms_p50,
       median(decode_ns / nullif(tokens_kept - 1, 0)) / 1e6 AS tpot_ms_p50,
       quantile_cont(decode_ns / nullif(tokens_kept - 1, 0), 0.99) / 1e6 AS tpot_ms_p99
FROM request
WHERE NOT is_warmup AND status <> 'error'
GROUP BY GROUPING SETS (
  (artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel, num_threads, workload),
  (artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel, num_threads));

-- What one arm did with one prompt, repetitions summed: what comparisons are paired on. tokens: kept after the first, in decode_ns.
CREATE VIEW v_arm_prompt AS
SELECT artifact_key, session_id, machine_id, created_at, target_key, draft_key, method, depth_k, batch_size, temperature, dtype, kernel,
       num_threads, workload, prompt_id, count(*) AS requests, sum(tokens_kept - 1)::BIGINT AS tokens, sum(decode_ns)::BIGINT AS decode_ns,
       sum(num_rounds)::BIGINT AS rounds, count(*) FILTER (WHERE identical IS NOT NULL) AS compared,
       count(*) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS divergences
FROM request WHERE NOT is_warmup AND status <> 'error' AND tokens_kept > 1 AND decode_ns > 0 GROUP BY ALL;

-- Each arm against the best plain decoding of the same session: the plain arm with the highest tok_s_decode over all workloads,
-- same dtype, threads, batch and temperature. A ratio of throughputs; intervals over prompts stand in v_depth and v_choice.
CREATE VIEW v_speedup AS
WITH best_plain AS (
  SELECT artifact_key, session_id, dtype, num_threads, batch_size, temperature, kernel
  FROM v_speed WHERE method = 'none' AND workload = 'all'
  QUALIFY row_number() OVER (PARTITION BY artifact_key, session_id, dtype, num_threads, batch_size, temperature
                             ORDER BY tok_s_decode DESC NULLS LAST, kernel) = 1),
base AS (
  SELECT s.artifact_key, s.session_id, s.dtype, s.num_threads, s.batch_size, s.temperature, s.workload, s.kernel AS base_kernel,
         s.tok_s_decode AS base_tok_s_decode, s.tok_s_e2e AS base_tok_s_e2e
  FROM v_speed s JOIN best_plain USING (artifact_key, session_id, dtype, num_threads, batch_size, temperature, kernel)
  WHERE s.method = 'none')
SELECT s.artifact_key, s.session_id, s.target_key, s.draft_key, s.method, s.depth_k, s.batch_size, s.temperature, s.dtype, s.kernel,
       s.num_threads, s.workload, s.requests, b.base_kernel, s.tok_s_decode, b.base_tok_s_decode,
       s.tok_s_decode / b.base_tok_s_decode AS speedup_decode_vs_best_plain, s.tok_s_e2e, b.base_tok_s_e2e,
       s.tok_s_e2e / b.base_tok_s_e2e AS speedup_e2e_vs_best_plain
FROM v_speed s LEFT JOIN base b USING (artifact_key, session_id, dtype, num_threads, batch_size, temperature, workload)
WHERE s.method <> 'none';

-- Is the output that of plain decoding? A tie is a divergence whose top-2 margin is within ten times the row-count noise.
CREATE VIEW v_parity AS
SELECT artifact_key, session_id, target_key, draft_key, method, depth_k, batch_size, dtype, kernel, temperature,
       count(*) FILTER (WHERE identical IS NOT NULL) AS compared, count(*) FILTER (WHERE identical) AS identical,
       count(*) FILTER (WHERE NOT identical AND tie) AS ties,
       count(*) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS divergences,
       min(first_divergence) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS earliest_divergence,
       max(divergence_margin) FILTER (WHERE NOT identical) AS largest_margin
FROM request WHERE NOT is_warmup AND status <> 'error' AND method <> 'none' GROUP BY ALL;

-- What a pass costs: the median over blocks of the median of each block.
CREATE VIEW v_cost AS
SELECT artifact_key, target_key, draft_key, method, phase, depth_k, batch_size, num_rows, kv_len, dtype, kernel, num_threads, machine_id,
       count(*) AS blocks, median(median_ns) / 1e6 AS ms_p50, min(median_ns) / 1e6 AS ms_min, max(median_ns) / 1e6 AS ms_max
FROM cost_cell GROUP BY ALL;

-- Predicted beside measured. Where a selection was confirmed later, the confirmed row stands here.
CREATE VIEW v_depth AS
SELECT selection_id, target_key, draft_key, method, workload, batch_size, depth_k, al, al_lo, al_hi, al_meas, t_target_ms, t_verify_ms,
       t_draft_ms, cost_ratio, marginal_gain, marginal_cost, speedup_pred, pred_lo, pred_hi, speedup_meas, meas_lo, meas_hi,
       speedup_pred / speedup_meas - 1 AS pred_error, p_best, regret, artifact_key, created_at
FROM depth_eval
QUALIFY row_number() OVER (PARTITION BY selection_id, draft_key, method, workload, batch_size, depth_k
                           ORDER BY (speedup_meas IS NOT NULL) DESC, created_at DESC, artifact_key) = 1;

-- The depth to serve with, and the verdict. Where a choice was confirmed later, the confirmed row stands here.
CREATE VIEW v_choice AS
SELECT selection_id, target_key, draft_key, method, workload, batch_size, depth_k, verdict, reasons, speedup_pred, pred_lo, pred_hi,
       speedup_meas, meas_lo, meas_hi, pred_error, p_beats_no_spec, rule, tolerance, pipeline, run_id, machine_id, artifact_key, created_at
FROM depth_choice
QUALIFY row_number() OVER (PARTITION BY selection_id, draft_key, method, workload, batch_size
                           ORDER BY (speedup_meas IS NOT NULL) DESC, created_at DESC, artifact_key) = 1;

-- The newest choices for each pipeline, target, method and workload, on each machine: a night has two, of challenger and champion.
CREATE VIEW v_latest AS
SELECT pipeline, method, workload, depth_k, verdict, speedup_meas, meas_lo, meas_hi, speedup_pred, pred_error, reasons, target_key,
       draft_key, batch_size, machine_id, selection_id, artifact_key, created_at
FROM v_choice
QUALIFY selection_id = first_value(selection_id) OVER (
  PARTITION BY pipeline, target_key, method, workload, batch_size, machine_id
  ORDER BY created_at DESC, (speedup_meas IS NOT NULL) DESC, artifact_key);

-- Reasons to doubt a number, newest first.
CREATE VIEW v_flags AS
SELECT severity, code, method, value, detail, draft_key, session_id, pipeline, step, artifact_key, created_at
FROM quality_flag ORDER BY created_at DESC;
