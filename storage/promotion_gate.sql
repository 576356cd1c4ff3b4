-- May a challenger take the champion's place? One row a check: name, passed, value, lo, hi, asked.
--
-- Both are compared as they are served (drafter and depth), on the prompts that both decoded, on one machine: in one run where there
-- is one, else in the newest two runs, each against plain decoding of its own run (in one run plain decoding cancels out).
-- Intervals and confidences come from resampling prompts, both sides together; the draws are the same every time.
-- Only our own loop is asked: a serving engine's speed says as much of the engine, and engine_gate.sql asks what it did.
-- Parameters: challenger, challenger_depth, challenger_bytes; champion, ...; same_target, min_prompts, least_prompts, num_draws,
-- max_slowdown, max_acceptance_loss, max_growth, confidence.
WITH chain_prompt AS (  -- trees are not yet served, and a drafter that is loaded but drafts nothing is nobody's way to serve
  SELECT * FROM v_arm_prompt WHERE engine IS NULL AND tree_budget IS NULL AND (method = 'none' OR depth_k > 0)),
served AS (
  SELECT CASE WHEN draft_key = $challenger AND depth_k = $challenger_depth THEN 'challenger' ELSE 'champion' END AS side, *
  FROM chain_prompt
  WHERE temperature = 0 AND ((draft_key = $challenger AND depth_k = $challenger_depth) OR (draft_key = $champion AND depth_k = $champion_depth))
  UNION ALL  -- the same drafter at the same depth is compared with itself
  SELECT 'champion', * FROM chain_prompt
  WHERE temperature = 0 AND draft_key = $champion AND depth_k = $champion_depth AND $champion = $challenger AND $champion_depth = $challenger_depth),
run AS (SELECT DISTINCT side, artifact_key, machine_id, created_at, target_key, dtype, batch_size FROM served),
pair AS (
  SELECT a.artifact_key AS a_run, b.artifact_key AS b_run, a.dtype, a.batch_size
  FROM run a JOIN run b USING (machine_id, dtype, batch_size)
  WHERE a.side = 'challenger' AND b.side = 'champion' AND (a.artifact_key = b.artifact_key OR a.target_key = b.target_key OR $same_target)
  ORDER BY a.artifact_key = b.artifact_key DESC, a.batch_size, least(a.created_at, b.created_at) DESC,
           greatest(a.created_at, b.created_at) DESC, a.dtype = 'float32' DESC, a.dtype, a_run, b_run LIMIT 1),
plain AS (  -- the best plain decoding of each run, as v_speedup takes it
  SELECT artifact_key, dtype, batch_size, kernel FROM v_speed
  WHERE engine IS NULL AND method = 'none' AND workload = 'all' AND temperature = 0
  QUALIFY row_number() OVER (PARTITION BY artifact_key, dtype, batch_size ORDER BY tokens_per_s DESC NULLS LAST, kernel) = 1),
plain_prompt AS (
  SELECT v.artifact_key, v.prompt_id, v.dtype, v.batch_size, v.tokens, v.decode_ns
  FROM chain_prompt v JOIN plain USING (artifact_key, dtype, batch_size, kernel) WHERE v.method = 'none' AND v.temperature = 0),
-- Speed: tokens over time of both sides, over those of plain decoding, prompt by prompt.
speed AS (
  SELECT a.prompt_id, a.tokens AS a_tokens, a.decode_ns AS a_ns, p.tokens AS ap_tokens, p.decode_ns AS ap_ns,
         b.tokens AS b_tokens, b.decode_ns AS b_ns, q.tokens AS bp_tokens, q.decode_ns AS bp_ns,
         row_number() OVER (ORDER BY a.prompt_id) - 1 AS i, count(*) OVER () AS n
  FROM pair
  JOIN served a ON a.side = 'challenger' AND (a.artifact_key, a.dtype, a.batch_size) = (a_run, pair.dtype, pair.batch_size)
  JOIN served b ON b.side = 'champion' AND (b.artifact_key, b.dtype, b.batch_size, b.prompt_id) = (b_run, pair.dtype, pair.batch_size, a.prompt_id)
  JOIN plain_prompt p ON (p.artifact_key, p.dtype, p.batch_size, p.prompt_id) = (a_run, pair.dtype, pair.batch_size, a.prompt_id)
  JOIN plain_prompt q ON (q.artifact_key, q.dtype, q.batch_size, q.prompt_id) = (b_run, pair.dtype, pair.batch_size, a.prompt_id)),
drawn AS (
  SELECT d, (sum(a_tokens) / sum(a_ns)) / (sum(ap_tokens) / sum(ap_ns)) / ((sum(b_tokens) / sum(b_ns)) / (sum(bp_tokens) / sum(bp_ns))) AS ratio
  FROM (SELECT unnest(range($num_draws)) AS d) JOIN (SELECT i AS s, n AS m FROM speed) ON true
  JOIN speed ON speed.i = md5_number_lower(concat(d, ':', s)) % m
  GROUP BY d),
speed_check AS (
  SELECT (sum(a_tokens) / sum(a_ns)) / (sum(ap_tokens) / sum(ap_ns)) / ((sum(b_tokens) / sum(b_ns)) / (sum(bp_tokens) / sum(bp_ns))) AS value,
         (SELECT quantile_cont(ratio, 0.025) FROM drawn) AS lo, (SELECT quantile_cont(ratio, 0.975) FROM drawn) AS hi,
         (SELECT avg((ratio >= 1 - $max_slowdown)::INT) FROM drawn) AS sure, count(*) AS prompts
  FROM speed),
-- Acceptance: tokens kept a round, at the deepest depth that both were run at (their own depth where it is the same).
common AS (
  SELECT max(depth_k) AS depth_k FROM (
    SELECT v.depth_k FROM chain_prompt v, pair WHERE v.artifact_key = a_run AND v.draft_key = $challenger AND v.temperature = 0
    INTERSECT
    SELECT v.depth_k FROM chain_prompt v, pair WHERE v.artifact_key = b_run AND v.draft_key = $champion AND v.temperature = 0)
  WHERE depth_k <= least($challenger_depth, $champion_depth)),
kept AS (
  SELECT w.workload, a.prompt_id, a.tokens AS a_tokens, a.rounds AS a_rounds, b.tokens AS b_tokens, b.rounds AS b_rounds,
         row_number() OVER (PARTITION BY w.workload ORDER BY a.prompt_id) - 1 AS i, count(*) OVER (PARTITION BY w.workload) AS n
  FROM pair, common
  JOIN chain_prompt a ON (a.artifact_key, a.dtype, a.batch_size, a.draft_key, a.depth_k, a.temperature)
                       = (a_run, pair.dtype, pair.batch_size, $challenger, common.depth_k, 0)
  JOIN chain_prompt b ON (b.artifact_key, b.dtype, b.batch_size, b.draft_key, b.depth_k, b.temperature, b.prompt_id)
                       = (b_run, pair.dtype, pair.batch_size, $champion, common.depth_k, 0, a.prompt_id)
  JOIN (SELECT DISTINCT unnest(['all', workload]) AS workload, workload AS member FROM chain_prompt) w ON w.member = a.workload
  WHERE a.rounds > 0 AND b.rounds > 0),
kept_drawn AS (
  SELECT kept.workload, d, (sum(a_tokens) / sum(a_rounds)) / (sum(b_tokens) / sum(b_rounds)) AS ratio
  FROM (SELECT unnest(range($num_draws)) AS d) JOIN (SELECT workload, i AS s, n AS m FROM kept) k ON true
  JOIN kept ON kept.workload = k.workload AND kept.i = md5_number_lower(concat(d, ':', s)) % m
  GROUP BY ALL),
kept_check AS (
  SELECT workload, (sum(a_tokens) / sum(a_rounds)) / (sum(b_tokens) / sum(b_rounds)) AS value,
         count(*) AS prompts, any_value(drawn.lo) AS lo, any_value(drawn.hi) AS hi, any_value(drawn.worse) AS worse
  FROM kept JOIN (SELECT workload, quantile_cont(ratio, 0.025) AS lo, quantile_cont(ratio, 0.975) AS hi,
                         avg((ratio < 1 - $max_acceptance_loss)::INT) AS worse FROM kept_drawn GROUP BY ALL) drawn USING (workload)
  GROUP BY workload),
identity AS (  -- in the run that speaks for it, at every batch size: what an older run found, a newer one may have mended
  SELECT sum(s.compared) AS compared, sum(s.divergences) AS divergences
  FROM pair JOIN served s ON s.side = 'challenger' AND (s.artifact_key, s.dtype) = (a_run, pair.dtype))
SELECT 'prompts_measured_for_both' AS name, coalesce(prompts, 0) >= $min_prompts AS passed, coalesce(prompts, 0)::DOUBLE AS value,
       NULL::DOUBLE AS lo, NULL::DOUBLE AS hi,
       format('>= {} prompts on one machine, {}', $min_prompts, CASE WHEN (SELECT a_run = b_run FROM pair) THEN 'both in one run'
              WHEN (SELECT count(*) FROM pair) = 1 THEN 'each in its own run' ELSE 'no such runs' END) AS asked, 1 AS place
FROM speed_check
UNION ALL
SELECT 'speed_against_champion', coalesce(sure >= $confidence, false), value, lo, hi,
       format('>= {:.2f} with {:.0f} % confidence, has {:.1f} %', 1 - $max_slowdown, 100 * $confidence, 100 * coalesce(sure, 0)), 2
FROM speed_check
UNION ALL
SELECT 'identical_output', coalesce(compared > 0 AND divergences = 0, false), divergences::DOUBLE, NULL, NULL,
       format('0 of {} outputs differ outside ties', coalesce(compared, 0)), 3
FROM identity
UNION ALL
SELECT 'acceptance[' || workload || ']',  -- so few prompts show nothing: one workload need not, all together must
       CASE WHEN prompts >= $least_prompts THEN worse < $confidence ELSE workload <> 'all' END, value, lo, hi,
       CASE WHEN prompts < $least_prompts AND workload <> 'all' THEN format('not asked of {} prompts', prompts)
            ELSE format('not below {:.2f} with {:.0f} % confidence, at depth {}', 1 - $max_acceptance_loss, 100 * $confidence, (SELECT depth_k FROM common))
                 || CASE WHEN prompts < $least_prompts THEN format(', of at least {} prompts', $least_prompts) ELSE '' END END, 4
FROM kept_check
UNION ALL
SELECT 'size', coalesce($challenger_bytes <= $champion_bytes * (1 + $max_growth), true), $challenger_bytes::DOUBLE / $champion_bytes, NULL, NULL,
       CASE WHEN $challenger_bytes IS NULL OR $champion_bytes IS NULL THEN 'sizes are not known' ELSE format('<= {:.2f}', 1 + $max_growth) END, 5
ORDER BY place, name
