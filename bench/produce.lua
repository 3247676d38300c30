-- One small JSON produce per request. Arguments: the topic, and a prefix for idempotency keys. With
-- a prefix every request has its own key; without one all requests are the same bytes.
-- wrk counts statuses of 400 and more by itself; a response() function would run Lua for every
-- answer. Any other failure would show in the number of stored messages.

local VALUE = string.rep("v", 100)

dofile(debug.getinfo(1, "S").source:match("^@(.*/)") .. "summary.lua")

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"

function init(args)
  local topic, prefix = args[1], args[2]
  local head = '{"topic":"' .. topic .. '","key":"k","value":"' .. VALUE .. '"'
  wrk.body = head .. "}"
  if prefix then
    local count = 0
    function request()
      count = count + 1
      local key = '{"idempotency_key":"' .. prefix .. count .. '"}'
      return wrk.format(nil, nil, nil, head .. ',"envelope":' .. key .. "}")
    end
  end
end
