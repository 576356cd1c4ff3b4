-- Do the engines that served this drafter do as our own loop does? One row, or none where no engine was compared.
--
-- Of several comparisons of one engine the newest counts, so that a mended export clears the flag by being measured again.
-- Parameter: draft_key.
WITH newest AS (
  SELECT engine, engine_version, method, depth_k, verdict FROM v_engine_comparison
  WHERE draft_key = $draft_key AND draft_key <> '' AND workload = 'all'
  QUALIFY row_number() OVER (PARTITION BY engine, method, depth_k, concurrency ORDER BY created_at DESC, artifact_key) = 1)
SELECT 'engine_mismatch' AS name, count(*) FILTER (WHERE verdict = 'mismatch') = 0 AS passed,
       count(*) FILTER (WHERE verdict = 'mismatch')::DOUBLE AS value, NULL::DOUBLE AS lo, NULL::DOUBLE AS hi,
       format('0 of {} engine runs differ in tokens or acceptance', count(*))
       || coalesce(' (' || string_agg(DISTINCT concat_ws(' ', engine, engine_version), ', ') FILTER (WHERE verdict = 'mismatch') || ')', '') AS asked
FROM newest HAVING count(*) > 0
