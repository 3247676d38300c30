-- One cache operation per request, over a thousand keys in turn. Arguments: the method, GET or PUT.
-- The requests are built beforehand, so that each one costs wrk only a table lookup.

local KEYS = 1000
local VALUE = string.rep("dnZ2", 33) .. "dg==" -- 100 times "v"

dofile(debug.getinfo(1, "S").source:match("^@(.*/)") .. "summary.lua")

function init(args)
  local method, path = args[1], wrk.path
  local body
  if method == "PUT" then
    body = '{"value":"' .. VALUE .. '"}'
    wrk.headers["Content-Type"] = "application/json"
  end
  local requests, turn = {}, 0
  for key = 1, KEYS do
    requests[key] = wrk.format(method, path .. "/key-" .. key, nil, body)
  end
  function request()
    turn = turn % KEYS + 1
    return requests[turn]
  end
end
