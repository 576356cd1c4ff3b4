-- Do the engines that served this drafter do as our own loop does? One row, or none where no engine was compared.
--
-- Of several comparisons of one engine the newest counts, so that a mended export clears the flag by being measured again;
-- of several rows of that newest one, every one. A run whose texts or rounds could not be compared says nothing and
-- clears nothing; methods without a drafter (prompt lookup) have no acceptance to compare, and are judged by their texts.
-- Parameter: draft_key.
WITH newest AS (
  SELECT engine, engine_version, method, depth_k, verdict FROM v_engine_comparison
  WHERE draft_key = $draft_key AND draft_key <> '' AND workload = 'all'
    AND (verdict <> 'not_compared' OR (method IN ('ngram', 'lookahead') AND num_compared > 0))
  QUALIFY created_at = max(created_at) OVER (PARTITION BY engine, method, depth_k, concurrency))
SELECT 'engine_mismatch' AS name, count(*) FILTER (WHERE verdict = 'mismatch') = 0 AS passed,
       count(*) FILTER (WHERE verdict = 'mismatch')::DOUBLE AS value, NULL::DOUBLE AS lo, NULL::DOUBLE AS hi,
       format('0 of {} engine runs differ in tokens or acceptance', count(*))
       || coalesce(' (' || string_agg(DISTINCT concat_ws(' ', engine, engine_version), ', ') FILTER (WHERE verdict = 'mismatch') || ')', '') AS asked
FROM newest HAVING count(*) > 0
