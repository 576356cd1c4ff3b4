-- Views over the history: every published number, each under the name of its convention.
--
-- Counts are stored (components/rows.py), conventions are made here. Words used throughout:
--   round     one draft-and-verify pass: d drafted, a accepted, normally a + 1 emitted (the bonus token is the target's own).
--             A round starts after the prefill token, which belongs to no round.
--   pooled    sums over rounds; macro: the mean over requests of each request's own figure. They differ by up to 23 %.
--   uncond    accepted to position i, over rounds that drafted i.  cond: over those that had also accepted i - 1.
-- What nobody reached or measured is NULL, never 0. workload 'all' is every workload together. Warm-up never counts.
-- The tables of components/rows.py and storage/records.py are views over the Parquet files, made before these. A column that
-- is younger than a file is NULL in its rows: tree_budget NULL is a chain, kv_len NULL the mean over all context lengths.
-- created_at stands in every view: a condition on it skips the parts of a compacted table that are too old, unread.

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

-- What one request's rounds kept. An arm is everything that could change a number, except the prompt and the repetition.
CREATE VIEW v_acceptance_request AS
SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
       num_threads, workload, prompt_id, request_id, num_rounds AS rounds, num_drafted AS drafted, num_accepted AS accepted,
       1 + num_accepted / num_rounds AS al_incl_bonus,
       num_accepted / num_rounds AS accepted_per_round_excl_bonus,
       num_accepted / nullif(num_drafted, 0) AS draft_acceptance_rate
FROM request
WHERE NOT is_warmup AND status <> 'error' AND method <> 'none' AND depth_k > 0 AND num_rounds > 0;

-- One row for each arm and workload: every convention side by side.
CREATE VIEW v_acceptance AS
SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
       num_threads, workload, count(*) AS requests, sum(rounds)::BIGINT AS rounds,
       sum(drafted)::BIGINT AS drafted, sum(accepted)::BIGINT AS accepted,
       1 + sum(accepted) / sum(rounds) AS al_pooled_incl_bonus,
       sum(accepted) / sum(rounds) AS accepted_per_round_excl_bonus,
       avg(al_incl_bonus) AS al_macro_incl_bonus,
       avg(accepted_per_round_excl_bonus) AS accepted_macro_excl_bonus,
       sum(accepted) / nullif(sum(drafted), 0) AS draft_acceptance_rate,
       avg(draft_acceptance_rate) AS draft_acceptance_rate_macro
FROM (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload) FROM v_acceptance_request)
GROUP BY ALL;

-- How often the i-th draft is kept. Numerators and denominators are kept, so that a position no round reached stays NULL.
--   accept_uncond        accepted / drafted, over rounds that drafted i
--   accept_cond          accepted / reached: given that i - 1 were kept, over rounds that drafted i
--   accept_joint         product of accept_cond up to i: 1 + its sum over i is the acceptance length
--   accept_of_rounds     accepted / rounds, whatever they drafted: what vLLM reports for a position
--   ..._macro            the mean over requests of each request's own figure
CREATE VIEW v_position AS
WITH counted AS (SELECT created_at, artifact_key, request_id, drafted AS d, accepted AS a, count(*) AS n FROM round GROUP BY ALL),
per_request AS (
  SELECT created_at, q.artifact_key, q.session_id, q.target_key, q.draft_key, q.method, q.depth_k, q.tree_budget, q.batch_size, q.temperature, q.dtype,
         q.kernel, q.num_threads, q.workload, q.request_id, p.position,
         sum(n) AS rounds,
         coalesce(sum(n) FILTER (WHERE d >= position), 0) AS drafted,
         coalesce(sum(n) FILTER (WHERE d >= position AND a >= position - 1), 0) AS reached,
         coalesce(sum(n) FILTER (WHERE d >= position AND a >= position), 0) AS accepted
  FROM counted JOIN request q USING (created_at, artifact_key, request_id) JOIN (SELECT unnest(range(1, 65)) AS position) p ON p.position <= q.depth_k
  WHERE NOT q.is_warmup AND q.status <> 'error' AND q.method <> 'none'
  GROUP BY ALL),
rates AS (
  SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, workload, position, count(*) AS requests, sum(rounds)::BIGINT AS rounds, sum(drafted)::BIGINT AS drafted,
         sum(reached)::BIGINT AS reached, sum(accepted)::BIGINT AS accepted,
         sum(accepted) / nullif(sum(drafted), 0) AS accept_uncond,
         sum(accepted) / nullif(sum(reached), 0) AS accept_cond,
         CASE WHEN sum(drafted) > 0 THEN sum(accepted) / sum(rounds) END AS accept_of_rounds,
         avg(accepted / nullif(drafted, 0)) AS accept_uncond_macro,
         avg(accepted / nullif(reached, 0)) AS accept_cond_macro
  FROM (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload) FROM per_request) GROUP BY ALL)
SELECT *, CASE WHEN accept_cond IS NOT NULL THEN product(accept_cond) OVER (
            PARTITION BY created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature,
                         dtype, kernel, num_threads, workload ORDER BY position) END AS accept_joint
FROM rates;

-- What the offline map says at every output position, which flatters: real rounds start just after a failure. proxy is the same
-- with teacher-forced inputs (the training metric). Neither is an acceptance length of decoding; v_acceptance is.
CREATE VIEW v_map AS
WITH cell AS (
  SELECT created_at, artifact_key, target_key, draft_key, method, workload, dtype, tree_budget, k_max, unnest(accepted) AS a,
         unnest(proxy_accepted) AS proxy
  FROM acceptance_map),
counted AS (
  SELECT created_at, artifact_key, target_key, draft_key, method, dtype, tree_budget, k_max, workload, a, proxy, count(*) AS n
  FROM cell GROUP BY ALL)
SELECT created_at, artifact_key, target_key, draft_key, method, dtype, tree_budget, workload, position, sum(n) FILTER (WHERE a IS NOT NULL)::BIGINT AS positions,
       coalesce(sum(n) FILTER (WHERE a >= position), 0) / nullif(sum(n) FILTER (WHERE a IS NOT NULL), 0) AS accept_joint_everywhere,
       coalesce(sum(n) FILTER (WHERE proxy >= position), 0) / nullif(sum(n) FILTER (WHERE proxy IS NOT NULL), 0)
         AS accept_joint_teacher_forced
FROM (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload) FROM counted)
JOIN (SELECT unnest(range(1, 65)) AS position) p ON p.position <= k_max
GROUP BY ALL;

-- Decode speed excludes prefill and what came with it: the token that prefill makes, or all tokens of an engine's first chunk. An answer
-- that came in one chunk has no decoding time and counts in e2e alone, which includes prefill. tpot: time per output token.
CREATE VIEW v_speed AS
WITH each AS (
  SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel, num_threads, engine,
         unnest(list_distinct([workload, 'all'])) AS workload, tokens_kept, ttft_ns, decode_ns,
         tokens_kept - coalesce(first_chunk_tokens, 1) AS after_first
  FROM request WHERE NOT is_warmup AND status <> 'error')
SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
       num_threads, engine, workload, count(*) AS requests, sum(tokens_kept)::BIGINT AS tokens_kept,
       1e9 * sum(after_first) FILTER (WHERE decode_ns > 0) / nullif(sum(decode_ns), 0) AS tok_s_decode,
       1e9 * sum(tokens_kept) / nullif(sum(ttft_ns + decode_ns), 0) AS tok_s_e2e,
       median(ttft_ns) / 1e6 AS ttft_ms_p50,
       median(decode_ns / nullif(after_first, 0)) FILTER (WHERE decode_ns > 0) / 1e6 AS tpot_ms_p50,
       quantile_cont(decode_ns / nullif(after_first, 0), 0.99) FILTER (WHERE decode_ns > 0) / 1e6 AS tpot_ms_p99
FROM each GROUP BY ALL;

-- Throughput: tokens of everything decoded side by side over the time until the last of them was done, prefill left out; v_speed is
-- what one request sees. Requests that a server decoded side by side share no batch_id (they come and go): they are not here.
CREATE VIEW v_throughput AS
WITH batch AS (
  SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, engine, coalesce(batch_id, request_id) AS batch_id, count(*) AS requests,
         sum(tokens_kept - coalesce(first_chunk_tokens, 1)) AS tokens, max(decode_ns) AS wall_ns
  FROM request WHERE NOT is_warmup AND status <> 'error' AND (batch_size = 1 OR batch_id IS NOT NULL) GROUP BY ALL),
arm AS (
  SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, engine, count(*) AS batches, sum(requests)::BIGINT AS requests, 1e9 * sum(tokens) / nullif(sum(wall_ns), 0) AS tok_s
  FROM batch GROUP BY ALL)
SELECT *, tok_s / max(tok_s) FILTER (WHERE method = 'none') OVER
            (PARTITION BY created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, engine) AS speedup_vs_plain
FROM arm;

-- What one arm did with one prompt in one process (0: the only one), repetitions summed: what comparisons are paired on. tokens: kept
-- after the first (after an engine's first chunk), in decode_ns; ns_per_token: of each repetition.
CREATE VIEW v_arm_prompt AS
SELECT artifact_key, session_id, machine_id, created_at, target_key, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype,
       kernel, num_threads, engine, workload, coalesce(process, 0) AS process, prompt_id, count(*) AS requests,
       sum(tokens_kept - coalesce(first_chunk_tokens, 1))::BIGINT AS tokens, sum(decode_ns)::BIGINT AS decode_ns,
       list(decode_ns / (tokens_kept - coalesce(first_chunk_tokens, 1))) AS ns_per_token, sum(num_rounds)::BIGINT AS rounds,
       count(*) FILTER (WHERE identical IS NOT NULL) AS compared,
       count(*) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS divergences
FROM request WHERE NOT is_warmup AND status <> 'error' AND tokens_kept > coalesce(first_chunk_tokens, 1) AND decode_ns > 0 GROUP BY ALL;

-- Each arm against the best plain decoding of the same session: the plain arm with the highest tok_s_decode over all workloads,
-- same engine (none: our own loop), dtype, threads, batch and temperature. A ratio of throughputs; intervals over prompts stand in
-- v_depth and v_choice.
CREATE VIEW v_speedup AS
WITH speed AS (SELECT *, coalesce(engine, '') AS decoded_by FROM v_speed),
best_plain AS (
  SELECT created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, kernel
  FROM speed WHERE method = 'none' AND workload = 'all'
  QUALIFY row_number() OVER (PARTITION BY created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by
                             ORDER BY tok_s_decode DESC NULLS LAST, kernel) = 1),
base AS (
  SELECT created_at, s.artifact_key, s.session_id, s.dtype, s.num_threads, s.batch_size, s.temperature, s.decoded_by, s.workload,
         s.kernel AS base_kernel, s.tok_s_decode AS base_tok_s_decode, s.tok_s_e2e AS base_tok_s_e2e
  FROM speed s JOIN best_plain USING (created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, kernel)
  WHERE s.method = 'none')
SELECT created_at, s.artifact_key, s.session_id, s.target_key, s.draft_key, s.method, s.depth_k, s.tree_budget, s.batch_size, s.temperature, s.dtype, s.kernel,
       s.num_threads, s.engine, s.workload, s.requests, b.base_kernel, s.tok_s_decode, b.base_tok_s_decode,
       s.tok_s_decode / b.base_tok_s_decode AS speedup_decode_vs_best_plain, s.tok_s_e2e, b.base_tok_s_e2e,
       s.tok_s_e2e / b.base_tok_s_e2e AS speedup_e2e_vs_best_plain
FROM speed s LEFT JOIN base b USING (created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, workload)
WHERE s.method <> 'none';

-- Is the output that of plain decoding? A tie is a divergence whose top-2 margin is within ten times the row-count noise.
CREATE VIEW v_parity AS
SELECT created_at, artifact_key, session_id, target_key, draft_key, method, depth_k, tree_budget, batch_size, dtype, kernel, temperature,
       count(*) FILTER (WHERE identical IS NOT NULL) AS compared, count(*) FILTER (WHERE identical) AS identical,
       count(*) FILTER (WHERE NOT identical AND tie) AS ties,
       count(*) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS divergences,
       min(first_divergence) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS earliest_divergence,
       max(divergence_margin) FILTER (WHERE NOT identical) AS largest_margin
FROM request WHERE NOT is_warmup AND status <> 'error' AND method <> 'none' GROUP BY ALL;

-- What a pass costs: the median over blocks of the median of each block.
CREATE VIEW v_cost AS
SELECT created_at, artifact_key, target_key, draft_key, method, phase, depth_k, tree_budget, batch_size, num_rows, kv_len, dtype, kernel, num_threads, machine_id,
       count(*) AS blocks, median(median_ns) / 1e6 AS ms_p50, min(median_ns) / 1e6 AS ms_min, max(median_ns) / 1e6 AS ms_max
FROM cost_cell GROUP BY ALL;

-- Predicted beside measured, of selections made since a time. Where a selection was confirmed later, the confirmed row stands here.
CREATE MACRO depths_since(since) AS TABLE
SELECT selection_id, target_key, draft_key, method, workload, batch_size, depth_k, tree_budget, al, al_lo, al_hi, al_meas, t_target_ms,
       t_verify_ms, t_draft_ms, cost_ratio, marginal_gain, marginal_cost, speedup_pred, pred_lo, pred_hi, speedup_meas, meas_lo, meas_hi,
       speedup_pred / speedup_meas - 1 AS pred_error, p_best, regret, pipeline, run_id, machine_id, artifact_key, created_at
FROM depth_eval
WHERE created_at >= since
QUALIFY row_number() OVER (PARTITION BY selection_id, draft_key, method, workload, batch_size, depth_k, tree_budget
                           ORDER BY (speedup_meas IS NOT NULL) DESC, created_at DESC, artifact_key) = 1;

CREATE VIEW v_depth AS FROM depths_since(TIMESTAMP '1970-01-01');

-- The depth to serve with, and the verdict. Where a choice was confirmed later, the confirmed row stands here.
CREATE VIEW v_choice AS
SELECT selection_id, target_key, draft_key, method, workload, batch_size, kv_len, depth_k, verdict, reasons, speedup_pred, pred_lo, pred_hi,
       speedup_meas, meas_lo, meas_hi, pred_error, p_beats_no_spec, loss, rule, tolerance, pipeline, run_id, machine_id, artifact_key, created_at
FROM depth_choice
QUALIFY row_number() OVER (PARTITION BY selection_id, draft_key, method, workload, batch_size, kv_len
                           ORDER BY (speedup_meas IS NOT NULL) DESC, created_at DESC, artifact_key) = 1;

-- The newest choices for each pipeline, target, method and workload, on each machine: a night has two, of challenger and champion.
CREATE VIEW v_latest AS
SELECT pipeline, method, workload, batch_size, kv_len, depth_k, verdict, speedup_meas, meas_lo, meas_hi, speedup_pred, pred_error, reasons,
       target_key, draft_key, machine_id, selection_id, artifact_key, created_at
FROM v_choice
QUALIFY selection_id = first_value(selection_id) OVER (
  PARTITION BY pipeline, target_key, method, workload, batch_size, kv_len, machine_id
  ORDER BY created_at DESC, (speedup_meas IS NOT NULL) DESC, artifact_key);

-- Challenger against champion on the same prompts of one session; ratio > 1: the challenger is better.
CREATE VIEW v_comparison AS
SELECT quantity, workload, method, challenger_depth, challenger_value, champion_method, champion_depth, champion_value, ratio, lo, hi, margin,
       verdict, num_prompts, challenger_key, champion_key, target_key, session_id, selection_id, pipeline, run_id, machine_id, artifact_key,
       created_at
FROM paired_comparison;

-- Acceptance length by language, a drafter for each training mix: the newest comparison of each pair of drafters at each depth. change:
-- against the baseline's drafter on the same prompts. coverage: answer tokens that the drafter can guess at all.
CREATE VIEW v_language AS
SELECT language, array_to_string(trained_on, '+') AS trained_on, num_trained_on, num_prompts, method, depth_k, al, al_lo, al_hi, change, change_lo,
       change_hi, verdict, coverage, draft_key, baseline_key, target_key, session_id, pipeline, run_id, machine_id, artifact_key, created_at
FROM acceptance_by_language
QUALIFY created_at = max(created_at) OVER (PARTITION BY draft_key, baseline_key, depth_k);

-- What serving engines counted about themselves, pooled over the server; positions as they report them, over all rounds.
CREATE VIEW v_engine_acceptance AS
SELECT created_at, engine, engine_version, source, method, depth_k, workload, concurrency, num_requests AS requests, num_rounds AS rounds,
       num_drafted AS drafted, num_accepted AS accepted,
       1 + num_accepted / nullif(num_rounds, 0) AS al_pooled_incl_bonus,
       num_accepted / nullif(num_rounds, 0) AS accepted_per_round_excl_bonus,
       num_accepted / nullif(num_drafted, 0) AS draft_acceptance_rate,
       [kept / nullif(num_rounds, 0) FOR kept IN accepted_per_position] AS accept_of_rounds,
       target_key, draft_key, session_id, machine_id, pipeline, run_id, artifact_key
FROM engine_acceptance;

-- A serving engine beside our own loop on the same prompts: predicted, ours and the engine's. gap: of acceptance length, engine over ours.
CREATE VIEW v_engine_comparison AS
SELECT created_at, engine, engine_version, method, depth_k, workload, concurrency, verdict, num_prompts, num_compared, num_identical, num_ties,
       num_divergences, num_paired, num_different, al_pred, al_ours, al_engine, al_engine / al_ours - 1 AS gap, tolerance, our_rounds_from,
       speedup_pred, speedup_ours, speedup_engine, target_key, draft_key, session_id, machine_id, pipeline, run_id, artifact_key
FROM engine_comparison;

-- Reasons to doubt a number, newest first.
CREATE VIEW v_flags AS
SELECT severity, code, method, value, detail, draft_key, session_id, pipeline, step, artifact_key, created_at
FROM quality_flag ORDER BY created_at DESC;

-- Trained drafters, with the numbers that training left in their facts; a number that a method does not have is NULL.
CREATE VIEW v_draft AS
SELECT artifact_key AS draft_key, info ->> 'method' AS method, (info ->> 'target_key') AS target_key,
       (info ->> 'num_parameters')::BIGINT AS parameters, seconds / 60 AS training_minutes, (info ->> 'best_step')::BIGINT AS best_step,
       settings, info, pipeline, run_id, machine_id, created_at
FROM artifact WHERE kind = 'Draft';
