-- What each arm did with each prompt in each process, in every measurement that timed one of these drafters: the rows that are
-- held against each other in pairs (components/speedup/comparison/pairing.py). Our own loop alone, at temperature 0: a serving engine's speed
-- says as much of the engine. Plain decoding of the same measurements is among them. Column for column components/promotion.py:
-- ArmPrompt. Parameter: drafts, a list of draft keys.
SELECT artifact_key, session_id, coalesce(machine_id, 'unknown') AS machine_id, created_at, target_key, dtype, batch_size, method, draft_key,
       depth_k, tree_budget, kernel, process, prompt_id, workload, requests, tokens, decode_ns, ns_per_token, rounds, compared, divergences
FROM v_arm_prompt
WHERE temperature = 0 AND engine IS NULL AND (method = 'none' OR list_contains($drafts, draft_key))
  AND artifact_key IN (SELECT DISTINCT artifact_key FROM request WHERE list_contains($drafts, draft_key))
ORDER BY ALL
