-- Views over the history: every published number, each under the name of its convention.
--
-- Counts are stored (components/rows.py), conventions are made here, by the names and formulae of components/definitions.py and
-- docs/numbers.md; a test holds the two against each other on random rows. Words used throughout:
--   round     one draft-and-verify pass: d drafted, a accepted, normally a + 1 emitted (the bonus token is the target's own).
--             A round starts after the prefill token, which belongs to no round. Cut: the end of the answer cut what it emits.
--   pooled    a ratio of sums; macro: the mean over prompts of each prompt's own figure. They differ by up to 23 %.
-- What nobody reached or measured is NULL, never 0. workload 'all' is every workload together. Warm-up and failed requests
-- never count.
-- The tables of components/rows.py and storage/history/records.py are views over the Parquet files, made before these. A column that
-- is younger than a file is NULL in its rows: tree_budget NULL is a chain, kv_len NULL the mean over all context lengths.
-- created_at stands in every view: a condition on it skips the parts of a compacted table that are too old, unread.
-- What was measured again is another session of its key: the tables hold all of them, newest('TABLE') leaves out those that a newer
-- valid one has superseded, and views are made of it. `draftsmith query --all-sessions` asks the same views of every session; in rows
-- of one artifact_key, created_at tells sessions apart.

CREATE MACRO newest(of) AS TABLE FROM query_table(of) ANTI JOIN v_left_out USING (created_at, artifact_key);

-- The models that drafters were made for. model: the name that every view has beside target_key: the model as the pipeline names it, of
-- a folder or an address the last part. Where one name stands for models of other files, the beginning of their digest tells them
-- apart; the same files are one model, whatever target_key they were loaded under. Targets that a step made are a model each.
CREATE VIEW v_target AS
WITH target AS (
  SELECT artifact_key AS target_key, arg_max(info, created_at) AS info, arg_max(info ->> 'model', created_at) AS location,
         coalesce(arg_max(info ->> 'digest', created_at),
                  CASE WHEN arg_max(uses, created_at) NOT IN ('', 'targets.load_target') THEN artifact_key END) AS digest,
         max(created_at) AS created_at
  FROM artifact WHERE kind = 'Target' GROUP BY artifact_key),
shortened AS (
  SELECT *, CASE WHEN regexp_matches(location, '^([/~.]|[A-Za-z]:[/\\]|[a-z][a-z0-9+.-]*://)') THEN regexp_extract(location, '([^/\\]+)[/\\]*$', 1)
                 ELSE location END AS name
  FROM target)
SELECT target_key, CASE WHEN digest IS NOT NULL AND min(digest) OVER same <> max(digest) OVER same THEN name || ' ' || left(digest, 8) ELSE name END AS model,
       digest, info ->> 'architecture' AS architecture, (info ->> 'num_params')::BIGINT AS parameters, created_at
FROM shortened WINDOW same AS (PARTITION BY name);

-- newest('TABLE') with the name of each row's target.
CREATE MACRO named(of) AS TABLE FROM newest(of) LEFT JOIN (SELECT target_key, model FROM v_target) USING (target_key);

-- Tokens that came within decode_ns: all but the first, or but an engine's first chunk; NULL for an answer without a decoding time.
CREATE MACRO decoded_tokens(tokens_kept, first_chunk, decode_ns) AS
  CASE WHEN decode_ns > 0 AND tokens_kept > coalesce(nullif(first_chunk, 0), 1) THEN tokens_kept - coalesce(nullif(first_chunk, 0), 1) END;

-- The machines of this history, each by a name for people: its device, cores and memory. Where one name stands for several machines,
-- the beginning of their machine_id tells them apart.
CREATE VIEW v_machine AS
WITH machine AS (
  SELECT machine_id, arg_max(machine, created_at) AS facts, count(*) AS artifacts, max(created_at) AS created_at
  FROM artifact WHERE machine_id IS NOT NULL GROUP BY machine_id),
named AS (
  SELECT *, coalesce(nullif(concat_ws(', ', facts ->> 'device_name', (facts ->> 'num_cores') || ' cores',
                                      round((facts ->> 'ram_gib')::DOUBLE)::BIGINT || ' GiB'), ''), machine_id) AS name FROM machine)
SELECT machine_id, CASE WHEN count(*) OVER (PARTITION BY name) > 1 THEN name || ' ' || left(machine_id, 6) ELSE name END AS machine_name,
       facts ->> 'device' AS device, facts ->> 'cpu_model' AS cpu_model, (facts ->> 'num_cores')::BIGINT AS num_cores,
       (facts ->> 'ram_gib')::DOUBLE AS ram_gib, facts ->> 'os' AS os, artifacts, created_at
FROM named;

-- Every run that has ended, newest first, with the time it took.
CREATE VIEW v_run AS
SELECT run_id, pipeline, status, reason, num_executed, num_reused, round(epoch(ended_at) - epoch(started_at), 1) AS seconds,
       started_at, ended_at, how, params, git_commit, draftsmith_version
FROM run ORDER BY started_at DESC;

-- The newest run, and the newest one before a run that is of the same pipeline and had a step.
CREATE MACRO newest_run() AS (SELECT run_id FROM run ORDER BY started_at DESC LIMIT 1);
CREATE MACRO run_before(later) AS (
  SELECT b.run_id FROM run a JOIN run b ON b.pipeline = a.pipeline AND b.started_at < a.started_at AND b.num_executed + b.num_reused > 0
  WHERE a.run_id = later ORDER BY b.started_at DESC LIMIT 1);

-- The newest valid session of every artifact, newest first.
CREATE VIEW v_artifact AS
SELECT artifact_key, kind, pipeline, step, seconds, peak_rss_mib, num_bytes, created_at, uses, settings, inputs, info, machine_id, machine,
       versions, code_sha256, run_id, draftsmith_version, session
FROM newest('artifact') ORDER BY created_at DESC;

-- Every making of every artifact. is_newest: views show it; of what was measured again the others are there for whoever asks.
CREATE VIEW v_session AS
SELECT a.artifact_key, a.session, s.artifact_key IS NULL AS is_newest, kind, pipeline, step, seconds, a.created_at, run_id, machine_id,
       draftsmith_version
FROM artifact a LEFT JOIN superseded s ON (s.artifact_key, s.created_at) = (a.artifact_key, a.created_at) ORDER BY a.created_at DESC;

-- Every step of every run that has ended, newest first, with what making its artifact took, whichever run made it. A reused step took
-- no seconds; making_seconds are those of the run that made it.
CREATE VIEW v_step AS
SELECT s.run_id, s.pipeline, s.step, s.status, s.kind, s.artifact_key, s.session, s.why, s.seconds, a.seconds AS making_seconds,
       a.peak_rss_mib, a.num_bytes, a.machine_id, a.versions, a.code_sha256, s.uses, s.settings, s.inputs, s.ended_at
FROM step s LEFT JOIN artifact a ON a.artifact_key = s.artifact_key AND coalesce(a.session, '') = coalesce(s.session, '')
ORDER BY s.ended_at DESC;

-- What each artifact was made from: one row for each input of its step.
CREATE VIEW v_input AS
SELECT artifact_key, parameter, split_part(unnest(CASE json_type(value) WHEN 'ARRAY' THEN value ->> '$[*]' ELSE [value ->> '$'] END), '.', 1) AS input_key,
       created_at
FROM (SELECT *, json_extract(inputs, '$."' || parameter || '"') AS value
      FROM (SELECT artifact_key, inputs, unnest(json_keys(inputs)) AS parameter, created_at FROM newest('artifact')));

-- What some artifacts (roots, a list of keys) were made from, themselves included (distance 0): each key once a root, at its shortest
-- distance. left_out: a list of parameters not to follow.
CREATE MACRO lineage_of(roots, left_out) AS TABLE
WITH RECURSIVE edge AS MATERIALIZED (SELECT artifact_key, input_key FROM v_input WHERE NOT list_contains(left_out, parameter)),
behind AS (
  SELECT unnest(roots) AS root_key, root_key AS artifact_key, 0 AS distance
  UNION SELECT root_key, input_key, distance + 1 FROM behind JOIN edge USING (artifact_key))
SELECT root_key, artifact_key, min(distance) AS distance FROM behind GROUP BY ALL;

-- The sources of rows that data steps have read, as they counted them (components/publish/card/lineage.py: sources_of says the same).
CREATE VIEW v_source AS
WITH a AS (SELECT artifact_key, pipeline, step, uses, info, run_id, created_at FROM newest('artifact')),
each AS (
  SELECT a.*, key AS source, value ->> 'licence' AS licence, (value ->> 'read')::BIGINT AS rows_read, (value ->> 'kept')::BIGINT AS rows_kept
  FROM a, json_each(info -> 'by_source') WHERE uses = 'data.collect_chats'
  UNION ALL
  SELECT a.*, key, info -> 'licences' ->> key, NULL, value::BIGINT FROM a, json_each(info -> 'sources') WHERE uses = 'data.collect_workloads'
  UNION ALL
  SELECT a.*, info ->> 'source', CASE info ->> 'source' WHEN 'python-stdlib' THEN 'PSF-2.0' END, (info ->> 'found')::BIGINT,
         coalesce((info ->> 'num_train')::BIGINT, 0) + coalesce((info ->> 'num_validation')::BIGINT, 0)
         + coalesce((info ->> 'num_test')::BIGINT, 0) + coalesce((info ->> 'num_warm_up')::BIGINT, 0)
  FROM a WHERE uses IN ('data.collect_prompts', 'data.collect_traffic'))
SELECT source, nullif(licence, '') AS licence, rows_read, rows_kept, pipeline, step, uses, artifact_key, run_id, created_at FROM each;

-- Every version of every registered model, with the release and the drafter behind it and the run that made it.
CREATE VIEW v_version AS
SELECT name, to_version AS version, arg_max(numbers ->> 'draftsmith.key', promoted_at) AS release_key,
       arg_max(numbers ->> 'draftsmith.draft_key', promoted_at) AS draft_key, arg_max(numbers ->> 'draftsmith.run_id', promoted_at) AS run_id,
       min(promoted_at) AS published_at
FROM promotion WHERE to_version IS NOT NULL GROUP BY name, to_version;

-- The version that each alias of each registered model is at now.
CREATE VIEW v_alias AS
SELECT name, alias, version, action, promoted_at, who, why, release_key, draft_key, run_id
FROM (SELECT *, to_version AS version FROM promotion WHERE action <> 'evidence'
      QUALIFY row_number() OVER (PARTITION BY name, alias ORDER BY promoted_at DESC, promotion_id DESC) = 1)
JOIN v_version USING (name, version);

-- The versions that a question is about: one of a number, else those that an alias is at; NULL: of every model.
CREATE MACRO versions_asked(of_model, of_alias, of_version) AS TABLE
SELECT * FROM v_version
WHERE (of_model IS NULL OR name = of_model)
  AND (version = of_version OR (of_version IS NULL AND (name, version) IN (SELECT (name, version) FROM v_alias WHERE alias = of_alias)));

-- What training recorded as it went, one row for each number and optimiser step.
CREATE VIEW v_training AS
SELECT artifact_key, pipeline, step, name, unnest(at_steps) AS at_step, unnest("values") AS value, run_id, created_at FROM newest('training_metric');

-- The library versions behind each artifact, one row a library.
CREATE VIEW v_library AS
SELECT artifact_key, kind, pipeline, step, library, versions ->> library AS library_version, machine_id, run_id, created_at
FROM (SELECT *, unnest(json_keys(versions)) AS library FROM newest('artifact'));

-- What one request's rounds kept. An arm is everything that could change a number, except the prompt and the repetition. al is NULL
-- where there are more tokens than the counted rounds can have emitted: engines leave rounds that guessed nothing out.
CREATE VIEW v_acceptance_request AS
SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
       num_threads, workload, prompt_id, request_id, tokens_kept - 1 AS tokens, num_rounds AS rounds, num_drafted AS drafted,
       num_accepted AS accepted,
       CASE WHEN tokens_kept - 1 <= num_accepted + num_rounds THEN (tokens_kept - 1) / num_rounds END AS al,
       num_accepted / num_rounds AS accepted_per_round,
       num_accepted / nullif(num_drafted, 0) AS draft_acceptance_rate
FROM named('request')
WHERE NOT is_warmup AND status <> 'error' AND method <> 'none' AND depth_k > 0 AND num_rounds > 0;

-- One row for each arm and workload: every convention side by side.
CREATE VIEW v_acceptance AS
WITH prompt AS (
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, workload, prompt_id, count(*) AS requests, bool_and(al IS NOT NULL) AS whole, sum(tokens) AS tokens,
         sum(rounds) AS rounds, sum(drafted) AS drafted, sum(accepted) AS accepted
  FROM (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload) FROM v_acceptance_request) GROUP BY ALL)
SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
       num_threads, workload, sum(requests)::BIGINT AS requests, sum(tokens)::BIGINT AS tokens, sum(rounds)::BIGINT AS rounds,
       sum(drafted)::BIGINT AS drafted, sum(accepted)::BIGINT AS accepted,
       CASE WHEN bool_and(whole) THEN sum(tokens) / sum(rounds) END AS al,
       CASE WHEN bool_and(whole) THEN avg(tokens / rounds) END AS al_macro,
       1 + sum(accepted) / sum(rounds) AS al_with_overshoot,
       sum(accepted) / sum(rounds) AS accepted_per_round,
       avg(accepted / rounds) AS accepted_per_round_macro,
       sum(accepted) / nullif(sum(drafted), 0) AS draft_acceptance_rate,
       avg(accepted / nullif(drafted, 0)) AS draft_acceptance_rate_macro
FROM prompt GROUP BY ALL;

-- How often the i-th draft is kept. Numerators and denominators are kept, so that a position no round reached stays NULL. drafted,
-- reached and accepted are of uncut rounds; rounds, drafted_in_all and accepted_in_all of every round.
--   accept_uncond        accepted / drafted, over rounds that drafted i
--   accept_cond          accepted / reached: given that i - 1 were kept, over rounds that drafted i
--   accept_joint         product of accept_cond up to i: 1 + its sum over i is al_uncut, where every round drafted all
--   accept_of_rounds     accepted_in_all / rounds, whatever they drafted: what vLLM reports for a position
--   ..._macro            the mean over prompts of each prompt's own figure
CREATE VIEW v_position AS
WITH counted AS (
  SELECT created_at, artifact_key, request_id, drafted AS d, accepted AS a, emitted > accepted AS uncut, count(*) AS n FROM round GROUP BY ALL),
per_prompt AS (
  SELECT created_at, q.artifact_key, q.session_id, q.target_key, q.model, q.draft_key, q.method, q.depth_k, q.tree_budget, q.batch_size, q.temperature, q.dtype,
         q.kernel, q.num_threads, q.workload, q.prompt_id, p.position,
         count(DISTINCT q.request_id) AS requests, sum(n) AS rounds,
         coalesce(sum(n) FILTER (WHERE d >= position), 0) AS drafted_in_all,
         coalesce(sum(n) FILTER (WHERE a >= position), 0) AS accepted_in_all,
         coalesce(sum(n) FILTER (WHERE uncut AND d >= position), 0) AS drafted,
         coalesce(sum(n) FILTER (WHERE uncut AND d >= position AND a >= position - 1), 0) AS reached,
         coalesce(sum(n) FILTER (WHERE uncut AND d >= position AND a >= position), 0) AS accepted
  FROM counted
  JOIN (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload) FROM named('request')
        WHERE NOT is_warmup AND status <> 'error' AND method <> 'none') q USING (created_at, artifact_key, request_id)
  JOIN (SELECT unnest(range(1, 65)) AS position) p ON p.position <= q.depth_k
  GROUP BY ALL),
rates AS (
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, workload, position, sum(requests)::BIGINT AS requests, sum(rounds)::BIGINT AS rounds,
         sum(drafted_in_all)::BIGINT AS drafted_in_all, sum(accepted_in_all)::BIGINT AS accepted_in_all, sum(drafted)::BIGINT AS drafted,
         sum(reached)::BIGINT AS reached, sum(accepted)::BIGINT AS accepted,
         sum(accepted) / nullif(sum(drafted), 0) AS accept_uncond,
         sum(accepted) / nullif(sum(reached), 0) AS accept_cond,
         CASE WHEN sum(drafted_in_all) > 0 THEN sum(accepted_in_all) / sum(rounds) END AS accept_of_rounds,
         avg(accepted / nullif(drafted, 0)) AS accept_uncond_macro,
         avg(accepted / nullif(reached, 0)) AS accept_cond_macro
  FROM per_prompt GROUP BY ALL)
SELECT *, CASE WHEN accept_cond IS NOT NULL THEN product(accept_cond) OVER (
            PARTITION BY created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature,
                         dtype, kernel, num_threads, workload ORDER BY position) END AS accept_joint
FROM rates;

-- What the offline map says at every output position, which flatters: real rounds start just after a failure. proxy is the same
-- with teacher-forced inputs (the training metric). Neither is an acceptance length of decoding; v_acceptance is.
CREATE VIEW v_map AS
WITH cell AS (
  SELECT created_at, artifact_key, target_key, model, draft_key, method, workload, dtype, tree_budget, k_max, unnest(accepted[:num_tokens - 1]) AS a,
         unnest(proxy_accepted[:num_tokens - 1]) AS proxy
  FROM named('acceptance_map')),
counted AS (
  SELECT created_at, artifact_key, target_key, model, draft_key, method, dtype, tree_budget, k_max, workload, a, proxy, count(*) AS n
  FROM cell GROUP BY ALL)
SELECT created_at, artifact_key, target_key, model, draft_key, method, dtype, tree_budget, workload, position, sum(n) FILTER (WHERE a IS NOT NULL)::BIGINT AS positions,
       coalesce(sum(n) FILTER (WHERE a >= position), 0) / nullif(sum(n) FILTER (WHERE a IS NOT NULL), 0) AS accept_joint_everywhere,
       coalesce(sum(n) FILTER (WHERE proxy >= position), 0) / nullif(sum(n) FILTER (WHERE proxy IS NOT NULL), 0)
         AS accept_joint_teacher_forced
FROM (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload) FROM counted)
JOIN (SELECT unnest(range(1, 65)) AS position) p ON p.position <= k_max
GROUP BY ALL;

-- tokens_per_s leaves prefill out and what came with it: the token that prefill makes, or all tokens of an engine's first chunk. An
-- answer that came in one chunk has no decoding time and counts in e2e alone, which includes prefill. tpot: time per output token.
CREATE VIEW v_speed AS
WITH each AS (
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel, num_threads, engine,
         unnest(list_distinct([workload, 'all'])) AS workload, tokens_kept, ttft_ns, decode_ns,
         decoded_tokens(tokens_kept, first_chunk_tokens, decode_ns) AS tokens
  FROM named('request') WHERE NOT is_warmup AND status <> 'error')
SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
       num_threads, engine, workload, count(*) AS requests, sum(tokens_kept)::BIGINT AS tokens_kept,
       1e9 * sum(tokens) / sum(decode_ns) FILTER (WHERE tokens IS NOT NULL) AS tokens_per_s,
       1e9 * sum(tokens_kept) / nullif(sum(ttft_ns + decode_ns), 0) AS tokens_per_s_e2e,
       median(ttft_ns) / 1e6 AS ttft_ms_p50,
       median(decode_ns / tokens) / 1e6 AS tpot_ms_p50,
       quantile_cont(decode_ns / tokens, 0.99) / 1e6 AS tpot_ms_p99
FROM each GROUP BY ALL;

-- Throughput: tokens of everything decoded side by side over the time until the last of them was done, prefill left out; v_speed is
-- what one request sees. Requests that a server decoded side by side share no batch_id (they come and go): they are not here.
CREATE VIEW v_throughput AS
WITH batch AS (
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, engine, coalesce(batch_id, request_id) AS batch_id, count(*) AS requests,
         coalesce(sum(decoded_tokens(tokens_kept, first_chunk_tokens, decode_ns)), 0) AS tokens, max(decode_ns) AS wall_ns
  FROM named('request') WHERE NOT is_warmup AND status <> 'error' AND (batch_size = 1 OR batch_id IS NOT NULL) GROUP BY ALL),
arm AS (
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, engine, count(*) AS batches, sum(requests)::BIGINT AS requests,
         1e9 * sum(tokens) / nullif(sum(wall_ns), 0) AS throughput_tokens_per_s
  FROM batch GROUP BY ALL)
SELECT *, throughput_tokens_per_s / nullif(max(throughput_tokens_per_s) FILTER (WHERE method = 'none') OVER
            (PARTITION BY created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, engine), 0) AS throughput_speedup
FROM arm;

-- What one arm did with one prompt in one process (0: the only one), repetitions summed: what comparisons are paired on. tokens: kept
-- after the first (after an engine's first chunk), in decode_ns; ns_per_token: of each repetition.
CREATE VIEW v_arm_prompt AS
SELECT artifact_key, session_id, machine_id, created_at, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype,
       kernel, num_threads, engine, workload, coalesce(process, 0) AS process, prompt_id, count(*) AS requests,
       sum(decoded_tokens(tokens_kept, first_chunk_tokens, decode_ns))::BIGINT AS tokens, sum(decode_ns)::BIGINT AS decode_ns,
       list(decode_ns / decoded_tokens(tokens_kept, first_chunk_tokens, decode_ns)) AS ns_per_token, sum(num_rounds)::BIGINT AS rounds,
       count(*) FILTER (WHERE identical IS NOT NULL) AS compared,
       count(*) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS divergences
FROM named('request') WHERE NOT is_warmup AND status <> 'error' AND decoded_tokens(tokens_kept, first_chunk_tokens, decode_ns) IS NOT NULL GROUP BY ALL;

-- Each arm against the best plain decoding of the same session: the plain kernel with the highest tokens_per_s over all workloads, same
-- engine (none: our own loop), dtype, threads, batch and temperature. speedup is on the prompts that one process decoded both ways,
-- repetitions of a (prompt, process) pair as one steady time: other work makes a time longer, never shorter, so the mean of the
-- shortest tenth, of at least three or, of few, the lower half. A prompt counts once, in however many processes. Intervals over prompts and processes stand in v_depth and v_choice.
CREATE VIEW v_speedup AS
WITH part AS (  -- of one arm, prompt and process
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, engine, coalesce(engine, '') AS decoded_by, workload, prompt_id, coalesce(process, 0) AS process, count(tokens) AS requests,
         sum(tokens) AS tokens, sum(decode_ns) FILTER (WHERE tokens IS NOT NULL) AS decode_ns, avg(tokens) AS mean_tokens,
         avg(tokens) * list_avg(list_sort(list(decode_ns / tokens) FILTER (WHERE tokens IS NOT NULL))[:greatest((count(tokens) + 9) // 10, least(3, (count(tokens) + 1) // 2))]) AS steady_ns,
         sum(tokens_kept) AS tokens_kept, sum(ttft_ns + decode_ns) AS e2e_ns
  FROM (SELECT * REPLACE (unnest(list_distinct([workload, 'all'])) AS workload),
               decoded_tokens(tokens_kept, first_chunk_tokens, decode_ns) AS tokens
        FROM named('request') WHERE NOT is_warmup AND status <> 'error') GROUP BY ALL),
best_plain AS (
  SELECT created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, coalesce(engine, '') AS decoded_by, kernel
  FROM v_speed WHERE method = 'none' AND workload = 'all'
  QUALIFY row_number() OVER (PARTITION BY created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by
                             ORDER BY tokens_per_s DESC NULLS LAST, kernel) = 1),
plain_part AS (
  SELECT p.* FROM part p
  JOIN best_plain USING (created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, kernel)
  WHERE p.method = 'none'),
plain AS (
  SELECT created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, workload, prompt_id,
         any_value(kernel) AS plain_kernel, sum(tokens) AS plain_tokens, sum(decode_ns) AS plain_ns, sum(tokens_kept) AS plain_kept,
         sum(e2e_ns) AS plain_e2e_ns
  FROM plain_part GROUP BY ALL),
prompt AS (
  SELECT created_at, s.artifact_key, s.session_id, s.target_key, s.model, s.draft_key, s.method, s.depth_k, s.tree_budget, s.batch_size, s.temperature,
         s.dtype, s.kernel, s.num_threads, s.engine, s.decoded_by, s.workload, s.prompt_id,
         coalesce(bool_or(s.tokens > 0 AND p.tokens > 0), false) AS shared,
         sum(s.requests) AS requests, sum(s.tokens) AS tokens, sum(s.decode_ns) AS decode_ns, sum(s.tokens_kept) AS tokens_kept,
         sum(s.e2e_ns) AS e2e_ns,
         avg(s.mean_tokens) FILTER (WHERE p.tokens > 0) AS ours, avg(s.steady_ns) FILTER (WHERE p.tokens > 0) AS our_ns,
         avg(p.mean_tokens) FILTER (WHERE s.tokens > 0) AS theirs, avg(p.steady_ns) FILTER (WHERE s.tokens > 0) AS their_ns
  FROM part s LEFT JOIN plain_part p
    USING (created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, workload, prompt_id, process)
  WHERE s.method <> 'none' GROUP BY ALL),
arm AS (
  SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, temperature, dtype, kernel,
         num_threads, engine, workload, coalesce(sum(requests) FILTER (WHERE shared), 0)::BIGINT AS requests,
         count(*) FILTER (WHERE shared) AS prompts, any_value(plain_kernel) AS plain_kernel,
         1e9 * sum(tokens) FILTER (WHERE shared) / sum(decode_ns) FILTER (WHERE shared) AS tokens_per_s,
         1e9 * sum(plain_tokens) FILTER (WHERE shared) / sum(plain_ns) FILTER (WHERE shared) AS plain_tokens_per_s,
         sum(ours) / sum(our_ns) * sum(their_ns) / sum(theirs) AS speedup,
         1e9 * sum(tokens_kept) FILTER (WHERE plain_kernel IS NOT NULL)
           / nullif(sum(e2e_ns) FILTER (WHERE plain_kernel IS NOT NULL), 0) AS tokens_per_s_e2e,
         1e9 * sum(plain_kept) / nullif(sum(plain_e2e_ns), 0) AS plain_tokens_per_s_e2e
  FROM prompt LEFT JOIN plain
    USING (created_at, artifact_key, session_id, dtype, num_threads, batch_size, temperature, decoded_by, workload, prompt_id)
  GROUP BY ALL)
SELECT *, tokens_per_s_e2e / nullif(plain_tokens_per_s_e2e, 0) AS speedup_e2e FROM arm;

-- Is the output that of plain decoding? Of a tie every token is the target's own choice, up to the noise measured there; expected_ties is
-- what rounding alone makes. first_wrong: the earliest token that is not, in any divergence.
CREATE VIEW v_parity AS
SELECT created_at, artifact_key, session_id, target_key, model, draft_key, method, depth_k, tree_budget, batch_size, dtype, kernel, temperature,
       count(*) FILTER (WHERE identical IS NOT NULL) AS compared, count(*) FILTER (WHERE identical) AS identical,
       count(*) FILTER (WHERE NOT identical AND tie) AS ties,
       count(*) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS divergences,
       min(first_divergence) FILTER (WHERE NOT identical AND tie IS NOT TRUE) AS earliest_divergence,
       min(first_wrong) AS first_wrong, max(divergence_shortfall) AS largest_shortfall,
       sum(tie_chance) FILTER (WHERE identical IS NOT NULL) AS expected_ties
FROM named('request') WHERE NOT is_warmup AND status <> 'error' AND method <> 'none' GROUP BY ALL;

-- What a pass costs: the median over blocks of the median of each block.
CREATE VIEW v_cost AS
SELECT created_at, artifact_key, target_key, model, draft_key, method, phase, depth_k, tree_budget, batch_size, num_rows, kv_len, dtype, kernel, num_threads, machine_id,
       count(*) AS blocks, median(median_ns) / 1e6 AS ms_p50, min(median_ns) / 1e6 AS ms_min, max(median_ns) / 1e6 AS ms_max
FROM named('cost_cell') GROUP BY ALL;

-- Predicted beside measured, of selections made since a time. Where a selection was confirmed later, the confirmed row stands here.
CREATE MACRO depths_since(since) AS TABLE
SELECT selection_id, target_key, model, draft_key, method, workload, batch_size, depth_k, tree_budget, al, al_lo, al_hi, al_meas, al_replayed, t_target_ms,
       t_verify_ms, t_draft_ms, cost_ratio, marginal_gain, marginal_cost, speedup_pred, pred_lo, pred_hi, speedup_meas, meas_lo, meas_hi,
       speedup_pred / speedup_meas - 1 AS pred_error, p_best, regret, pipeline, run_id, machine_id, artifact_key, created_at
FROM named('depth_eval')
WHERE created_at >= since
QUALIFY row_number() OVER (PARTITION BY selection_id, draft_key, method, workload, batch_size, depth_k, tree_budget,
                                        earlier_run(created_at, artifact_key, run_id)
                           ORDER BY (speedup_meas IS NOT NULL) DESC, created_at DESC, artifact_key) = 1;

-- Predicted beside measured, depth by depth, of every selection; the confirmed row where there is one.
CREATE VIEW v_depth AS FROM depths_since(TIMESTAMP '1970-01-01');

-- The depth to serve with, and the verdict. Where a choice was confirmed later, the confirmed row stands here.
CREATE VIEW v_choice AS
SELECT selection_id, target_key, model, draft_key, method, workload, batch_size, kv_len, depth_k, verdict, reasons, speedup_pred, pred_lo, pred_hi,
       speedup_meas, meas_lo, meas_hi, pred_error, p_beats_no_spec, loss, rule, tolerance, pipeline, run_id, machine_id, artifact_key, created_at
FROM named('depth_choice')
QUALIFY row_number() OVER (PARTITION BY selection_id, draft_key, method, workload, batch_size, kv_len,
                                        earlier_run(created_at, artifact_key, run_id)
                           ORDER BY (speedup_meas IS NOT NULL) DESC, created_at DESC, artifact_key) = 1;

-- The newest choices for each pipeline, target, method and workload, on each machine: a night has two, of challenger and champion.
CREATE VIEW v_latest AS
SELECT pipeline, method, workload, batch_size, kv_len, depth_k, verdict, speedup_meas, meas_lo, meas_hi, speedup_pred, pred_error, reasons,
       target_key, model, draft_key, machine_id, selection_id, artifact_key, created_at
FROM v_choice
QUALIFY selection_id = first_value(selection_id) OVER (
  PARTITION BY pipeline, target_key, method, workload, batch_size, kv_len, machine_id
  ORDER BY created_at DESC, (speedup_meas IS NOT NULL) DESC, artifact_key);

-- Challenger against champion on the same prompts of one session; ratio > 1: the challenger is better.
CREATE VIEW v_comparison AS
SELECT quantity, workload, method, challenger_depth, challenger_value, champion_method, champion_depth, champion_value, ratio, lo, hi, margin,
       verdict, num_prompts, challenger_key, champion_key, target_key, model, session_id, selection_id, pipeline, run_id, machine_id, artifact_key,
       created_at
FROM named('paired_comparison');

-- Acceptance length by language, a drafter for each training mix: the newest comparison of each pair of drafters at each depth. change:
-- against the baseline's drafter on the same prompts. coverage: answer tokens that the drafter can guess at all.
CREATE VIEW v_language AS
SELECT language, array_to_string(trained_on, '+') AS trained_on, num_trained_on, num_prompts, method, depth_k, al, al_lo, al_hi, change, change_lo,
       change_hi, verdict, coverage, draft_key, baseline_key, target_key, model, session_id, pipeline, run_id, machine_id, artifact_key, created_at
FROM named('acceptance_by_language')
QUALIFY created_at = max(created_at) OVER (PARTITION BY draft_key, baseline_key, depth_k);

-- What serving engines counted about themselves, pooled over the server; positions as they report them, over all rounds.
CREATE VIEW v_engine_acceptance AS
SELECT created_at, engine, engine_version, source, method, depth_k, workload, concurrency, num_requests AS requests, num_rounds AS rounds,
       num_drafted AS drafted, num_accepted AS accepted,
       1 + num_accepted / nullif(num_rounds, 0) AS al_with_overshoot,
       num_accepted / nullif(num_rounds, 0) AS accepted_per_round,
       num_accepted / nullif(num_drafted, 0) AS draft_acceptance_rate,
       [kept / nullif(num_rounds, 0) FOR kept IN accepted_per_position] AS accept_of_rounds,
       target_key, model, draft_key, session_id, machine_id, pipeline, run_id, artifact_key
FROM named('engine_acceptance');

-- A serving engine beside our own loop on the same prompts: predicted, ours and the engine's. gap: of acceptance length, engine over ours.
CREATE VIEW v_engine_comparison AS
SELECT created_at, engine, engine_version, method, depth_k, workload, concurrency, verdict, num_prompts, num_compared, num_identical, num_ties,
       num_divergences, num_paired, num_different, al_pred, al_ours, al_engine, al_engine / al_ours - 1 AS gap, tolerance, our_rounds_from,
       speedup_pred, speedup_ours, speedup_engine, target_key, model, draft_key, session_id, machine_id, pipeline, run_id, artifact_key
FROM named('engine_comparison');

-- Trained drafters, with the numbers that training left in their facts; a number that a method does not have is NULL.
CREATE VIEW v_draft AS
SELECT artifact_key AS draft_key, info ->> 'method' AS method, a.target_key, model, (info ->> 'num_parameters')::BIGINT AS parameters,
       seconds / 60 AS training_minutes, (info ->> 'best_step')::BIGINT AS best_step, settings, info, pipeline, run_id, machine_id, a.created_at
FROM (SELECT *, info ->> 'target_key' AS target_key FROM newest('artifact') WHERE kind = 'Draft') a
LEFT JOIN (SELECT target_key, model FROM v_target) USING (target_key);

-- Reasons to doubt a number, newest first.
CREATE VIEW v_flags AS
SELECT severity, code, method, value, detail, model, draft_key, session_id, pipeline, step, artifact_key, created_at
FROM newest('quality_flag') LEFT JOIN (SELECT draft_key, model FROM v_draft) USING (draft_key) ORDER BY created_at DESC;
